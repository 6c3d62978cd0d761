"""Policy: which code is captured, stances, reports."""
