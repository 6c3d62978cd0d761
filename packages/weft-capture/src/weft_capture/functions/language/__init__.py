"""Rows for builtins and the standard library."""
