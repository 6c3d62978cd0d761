"""The symbolic interpreter: frames, steps, the tracer, and the undo journal."""
