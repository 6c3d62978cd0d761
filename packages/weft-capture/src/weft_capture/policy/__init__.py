"""Policy: which code is captured, stances, coroutines, reports."""
