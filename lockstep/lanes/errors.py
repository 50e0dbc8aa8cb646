"""The error of this package: everything that is wrong, at once."""

from __future__ import annotations

from collections.abc import Sequence


class LanesError(Exception):
    """A declaration, catalogue, machine or command line that can't be used; each problem says what would be right."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))
