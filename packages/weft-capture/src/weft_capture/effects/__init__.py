"""Side effects of a captured frame: writes, deferred calls, run-time checks."""
