"""Grades mathematical answers with math-verify in processes that can be killed."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq

from lockstep.tasks.grader_pool import GradeResult, GraderPool

DEFAULT_TIMEOUT_S = 5.0
"""Longest time for one answer. Ordinary answers take milliseconds."""


def default_num_workers() -> int:
    """Two: grading is a small share of a step, and each worker holds some 100 MB. One where there is one core."""
    return min(2, os.cpu_count() or 1)


class MathGrader:
    """``grade`` compares completions with reference answers; see ``math_rules`` for the rules. Usable from any thread.

    Example: ``MathGrader(num_workers=2, timeout_s=5.0).grade([("1/2", "so it is \\\\boxed{0.5}")])[0].score == 1.0``.
    """

    def __init__(self, num_workers: int | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._pool = GraderPool("math", num_workers or default_num_workers(), timeout_s)

    def grade(self, pairs: Seq[tuple[str, str]]) -> list[GradeResult]:
        """Results for (reference answer, completion) pairs, in order: the reference comes first."""
        return self._pool.grade(pairs)

    @property
    def process_ids(self) -> list[int]:
        """Of the worker processes that run now."""
        return self._pool.process_ids

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()
