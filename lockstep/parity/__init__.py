"""Judging whether trainer and engine run the same policy."""
