r"""How a mathematical answer is compared with its reference; runs inside the grader's own process.

What the completion's answer is: the content of its last ``\boxed{}`` and nothing else; only a completion without a
box is searched by math-verify (after "answer is", the last formula, the last number). A reference that is a single
letter A to J is multiple choice and compared as a letter, never by symbols.
"""

from __future__ import annotations

import re

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from lockstep.tasks.extract import last_boxed

_CONFIG = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_CHOICE = re.compile(r"\(?\s*([A-J])\s*\)?\.?")
_STATED_CHOICE = re.compile(r"\banswer\s*(?:is|:)?\s*:?\s*\(?\s*\$?([A-J])\$?\s*\)?(?![A-Za-z])", re.IGNORECASE)
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}")


def grade(gold: str, text: str) -> float:
    """1.0 if the completion ``text`` gives the answer ``gold``, else 0.0. Raises where that can't be decided."""
    choice = _CHOICE.fullmatch(gold.strip())
    if choice:
        return float(_chosen_letter(text) == choice.group(1))
    expected = _parse(gold if last_boxed(gold) is not None else rf"\boxed{{{gold}}}")
    if not expected:
        raise ValueError(f"the reference answer {gold!r} can't be read as mathematics")
    boxed = last_boxed(text)
    found = _parse(rf"\boxed{{{boxed}}}" if boxed is not None else text)
    failure: Exception | None = None
    for reference in expected:
        for candidate in found:
            try:
                # The comparison is not symmetric: the reference comes first (huggingface/open-r1#557).
                if verify(reference, candidate, timeout_seconds=None, raise_on_error=True):
                    return 1.0
            except Exception as error:
                failure = error
    if failure is not None:
        raise failure
    return 0.0


def _parse(text: str) -> list:
    return parse(text, _CONFIG, parsing_timeout=None, raise_on_error=True)  # type: ignore[arg-type]


def _chosen_letter(text: str) -> str | None:
    """The letter in the last box; without a box the last stated one ("the answer is (B)") or a text that is a letter.
    A stray letter in prose is not an answer."""
    boxed = last_boxed(text)
    if boxed is not None:
        plain = _LATEX_TEXT.sub(r"\1", boxed).replace("$", "").strip()
        match = _CHOICE.fullmatch(plain) or re.fullmatch(r"\(?([A-J])[).:]\s.*", plain, re.DOTALL)
        return match.group(1) if match else None
    whole = _CHOICE.fullmatch(text.strip())
    if whole:
        return whole.group(1)
    stated = _STATED_CHOICE.findall(text)
    return stated[-1].upper() if stated else None
