"""What a refused configuration says: every problem at once, each with the key, its value, where the value came from,
what is allowed and the way out. Plain data, so that a program can read it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """One problem of a configuration.

    ``key`` is dotted ("trainer.learning_rate"; "" when the problem has no key), ``also`` the other keys that take
    part in it. ``settings`` are lines "key = value  [origin]" of all of them, filled in by the loader.

    Example: ``Violation("algorithm.length_norm", "has no effect with aggregation token_mean", "remove it")``.
    """

    key: str
    message: str
    way_out: str
    also: tuple[str, ...] = ()
    allowed: str | None = None
    settings: tuple[str, ...] = ()

    def text(self) -> str:
        """The problem as indented lines for a terminal."""
        lines = [f"  {line}" for line in self.settings or ((self.key,) if self.key else ())]
        lines.append(f"      {self.message}" if lines else f"  {self.message}")
        if self.allowed:
            lines.append(f"      allowed: {self.allowed}")
        if self.way_out:
            lines.append(f"      way out: {self.way_out}")
        return "\n".join(lines)


class ConfigError(ValueError):
    """A configuration that was refused. ``violations`` holds every problem; ``str()`` is the text for a person."""

    def __init__(self, subject: str, violations: Sequence[Violation]) -> None:
        self.subject = subject
        self.violations = tuple(violations)
        count = "1 problem" if len(self.violations) == 1 else f"{len(self.violations)} problems"
        super().__init__("\n\n".join([f"{subject}: {count}", *(v.text() for v in self.violations)]))
