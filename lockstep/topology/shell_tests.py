"""Conditions of a script: ``[ … ]``, ``test``, ``[[ … ]]`` on what is known, with how sure the answer is."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.topology.shell_values import State, Value


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a command succeeds. ``value`` None: unknown. ``sure`` False: it rests on an assumption (a variable that
    nothing in the script sets is unset). ``command``: an ordinary command, whose result nobody computed."""

    value: bool | None
    sure: bool = True
    command: bool = False

    def negated(self) -> Verdict:
        """The opposite, as sure."""
        return Verdict(None if self.value is None else not self.value, self.sure)


YES, NO, UNDECIDED = Verdict(True), Verdict(False), Verdict(None, False)
RAN = Verdict(True, sure=False, command=True)

_NUMERIC: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_MAX_TERMS = 200


def judge(terms: Sequence[Value], state: State, *, patterns: bool) -> Verdict:
    """The truth of a test's terms. ``patterns``: ``[[``, whose == takes a pattern. Undecided where it is malformed."""
    if not terms:
        return NO
    if len(terms) > _MAX_TERMS:
        return UNDECIDED
    reader = _Reader(terms, state, patterns)
    try:
        verdict = reader.either()
    except IndexError:
        return UNDECIDED
    return verdict if reader.index == len(terms) else UNDECIDED


class _Reader:
    def __init__(self, terms: Sequence[Value], state: State, patterns: bool) -> None:
        self.terms = terms
        self.state = state
        self.patterns = patterns
        self.index = 0

    def peek(self, ahead: int = 0) -> str | None:
        at = self.index + ahead
        return self.terms[at].known if at < len(self.terms) else None

    def take(self) -> Value:
        value = self.terms[self.index]
        self.index += 1
        return value

    def either(self) -> Verdict:
        verdict = self.both()
        while self.peek() in ("||", "-o"):
            self.take()
            verdict = _or(verdict, self.both())
        return verdict

    def both(self) -> Verdict:
        verdict = self.opposite()
        while self.peek() in ("&&", "-a"):
            self.take()
            verdict = _or(verdict.negated(), self.opposite().negated()).negated()
        return verdict

    def opposite(self) -> Verdict:
        if self.peek() == "!" and self.index + 1 < len(self.terms):
            self.take()
            return self.opposite().negated()
        if self.peek() == "(" and self.patterns:
            self.take()
            verdict = self.either()
            return verdict if self.take().known == ")" else UNDECIDED
        return self.primary()

    def primary(self) -> Verdict:
        left = self.take()
        second = self.peek()
        if left.known in ("-z", "-n") and self.index < len(self.terms) and second not in ("&&", "||", "-a", "-o"):
            text = self.take()
            empty = _with(text, lambda known: known == "")
            return empty if left.known == "-z" else empty.negated()
        if left.known == "-v" and second:
            name = self.take().known or ""
            return Verdict(True) if self.state.get(name) is not None else Verdict(False, sure=False)
        if left.known and re.fullmatch(r"-[a-zA-Z]", left.known) and second is not None and second not in _NUMERIC:
            self.take()
            return UNDECIDED
        if second in ("=", "==", "!="):
            self.take()
            same = self.same(left, self.take())
            return same if second != "!=" else same.negated()
        if second in _NUMERIC:
            self.take()
            return _numbers(_NUMERIC[second], left, self.take())
        if second in ("=~", "<", ">", "-nt", "-ot", "-ef"):
            self.take()
            self.take()
            return UNDECIDED
        return _with(left, lambda known: known != "")

    def same(self, left: Value, right: Value) -> Verdict:
        first, second = left.assumed, right.assumed
        if first is None or second is None:
            return UNDECIDED
        sure = left.certain and right.certain
        if self.patterns and len(second) < 200 and second.count("*") < 5:
            return Verdict(fnmatch.fnmatchcase(first, second), sure)
        return Verdict(first == second, sure)


def _with(value: Value, holds: Callable[[str], bool]) -> Verdict:
    text = value.assumed
    if text is None:
        certain = any(isinstance(part, str) and part for part in value.parts)
        return Verdict(holds(value.text)) if certain else UNDECIDED
    return Verdict(holds(text), sure=value.certain)


def _numbers(compare: Callable[[int, int], bool], left: Value, right: Value) -> Verdict:
    texts = [left.assumed, right.assumed]
    numbers = [int(text) for text in texts if text is not None and re.fullmatch(r"\s*[-+]?[0-9]{1,18}\s*", text)]
    if len(numbers) != 2:
        return UNDECIDED
    return Verdict(compare(*numbers), sure=left.certain and right.certain)


def _or(first: Verdict, second: Verdict) -> Verdict:
    for verdict in (first, second):
        if verdict.value and verdict.sure:
            return verdict
    if first.value or second.value:
        return Verdict(True, sure=False)
    if first.value is None or second.value is None:
        return UNDECIDED
    return Verdict(False, first.sure and second.sure)
