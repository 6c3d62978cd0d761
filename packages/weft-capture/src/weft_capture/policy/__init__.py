"""What is compiled and how: which code, stances, decorators, the cache of captures, reports."""
