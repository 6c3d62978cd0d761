"""Python's data model: values that represent objects, and attribute access on them."""
