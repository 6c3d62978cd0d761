"""Rules for builtins and the standard library."""
