"""Policy: which code is captured, stances, decorators, the cache of captures, reports."""
