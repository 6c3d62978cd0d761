"""Rows for torch."""
