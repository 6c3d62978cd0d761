"""Generate the code object that replaces a captured frame."""
