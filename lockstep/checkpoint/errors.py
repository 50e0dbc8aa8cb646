"""What is wrong with a checkpoint: every problem at once, grouped by kind, in a text of bounded length.

A hostile or broken folder can have hundreds of thousands of problems, and its names are whatever its author wrote: a
text here shows a few of each kind, says how many there are, and escapes what a terminal would act on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

SHOWN_OF_A_KIND = 5
SHOWN_CHARACTERS = 200
SHOWN_KINDS = 40


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. ``kind`` groups problems in a text and may stand alone as a heading; ``text`` says what
    is wrong, where, and what would be right.

    Example: ``Problem("missing tensor", "model.norm.weight: BF16 [64] is expected by config.json")``.
    """

    kind: str
    text: str


def shown(value: Any) -> str:
    """A value from an untrusted file for a message: ASCII, on one line, cut after 200 characters."""
    text = value if isinstance(value, str) and value and value.isprintable() else repr(value)
    text = text.encode("ascii", "backslashreplace").decode("ascii")
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}… ({len(text)} characters)"


def described(problems: Iterable[Problem]) -> str:
    """The problems grouped by kind in order of their first appearance, a few of each: at most some 250 lines."""
    groups: dict[str, list[str]] = {}
    for problem in problems:
        groups.setdefault(problem.kind, []).append(problem.text)
    lines: list[str] = []
    for kind, texts in list(groups.items())[:SHOWN_KINDS]:
        lines.append(f"{kind} ({len(texts)}):" if len(texts) > 1 else f"{kind}:")
        lines += [f"  {text}" for text in texts[:SHOWN_OF_A_KIND]]
        if len(texts) > SHOWN_OF_A_KIND:
            lines.append(f"  … and {len(texts) - SHOWN_OF_A_KIND} more")
    if len(groups) > SHOWN_KINDS:
        lines.append(f"… and {len(groups) - SHOWN_KINDS} more kinds of problems")
    return "\n".join(lines)


class CheckpointError(ValueError):
    """A checkpoint is refused. ``problems`` has every reason; the text shows a few of each kind.

    ``where`` is the folder, or what was attempted on it. A reason given as plain text is a problem of kind "refused".
    """

    def __init__(self, where: object, problems: Iterable[Problem | str]) -> None:
        self.problems: tuple[Problem, ...] = tuple(
            Problem("refused", item) if isinstance(item, str) else item for item in problems
        )
        count = len(self.problems)
        super().__init__(f"{where}: {count} problem{'' if count == 1 else 's'}\n{described(self.problems)}")
