"""The symbolic interpreter: frames, stepping, the tracer, the journal of what can be undone."""
