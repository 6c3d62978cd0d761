"""From a finished capture to the code object that replaces the frame."""
