"""Finds the answer inside a completion, by stated rules and without any grading.

Every rule is closed: where a completion holds a box or an answer tag, that is the answer, and nothing else in the text
is looked at.
"""

from __future__ import annotations

import re
from decimal import Decimal

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_STATED = re.compile(r"(?:\banswer\s+is\b\s*:?|\banswer\s*:)", re.IGNORECASE)
# A minus sign belongs to the number unless something it could be subtracted from stands right before it: 5-3 ends in 3.
_NUMBER = re.compile(r"(?:(?<![\w).])[-−])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{…}`` with balanced braces; None if there is none."""
    for start in reversed([match.end() for match in _BOX.finditer(text)]):
        depth = 1
        for position in range(start, len(text)):
            if text[position] == "{" and text[position - 1] != "\\":
                depth += 1
            elif text[position] == "}" and text[position - 1] != "\\":
                depth -= 1
            if depth == 0:
                return text[start:position]
    return None


def last_tagged(text: str) -> str | None:
    """Content of the last ``<answer>…</answer>``, stripped; None if there is none."""
    found = _TAG.findall(text)
    return found[-1].strip() if found else None


def last_number(text: str) -> Decimal | None:
    """The last number of the text (``1,234`` and ``−5`` are read as people write them); None if there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("−", "-")) if found else None


def stated_answer(text: str, num_lines: int = 1) -> str:
    r"""The answer of a free completion: what is handed to a grader that compares whole answers.

    In this order: the last ``<answer>`` tag; the last ``\boxed{}``; what follows the last "the answer is" or
    "answer:" (one line if ``num_lines`` is 1, and without the full stop at its end); the last ``num_lines`` lines that
    are not empty. ``num_lines`` is how many lines a right answer has.
    """
    tagged = last_tagged(text)
    if tagged is not None:
        return tagged
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    marks = list(_STATED.finditer(text))
    if marks:
        rest = text[marks[-1].end() :].strip()
        if rest:
            return rest.splitlines()[0].strip().removesuffix(".").rstrip() if num_lines == 1 else rest
    lines = text.strip().splitlines()
    if num_lines > 1:
        return "\n".join(lines[-num_lines:])
    return lines[-1].strip() if lines else ""
