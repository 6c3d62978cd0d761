"""Passes on a captured graph before a backend compiles it."""
