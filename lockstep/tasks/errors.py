"""The one error type of tasks, prompts and rewards."""

from __future__ import annotations


class TaskError(ValueError):
    """A task, its data, prompts or rewards can't be used; the text says what, where, and what would be right."""
