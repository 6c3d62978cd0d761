"""Python's data model: the values that stand for objects, and what attribute access does."""
