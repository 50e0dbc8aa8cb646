"""Arithmetic of the shell on what is known: ``$((nodes * 8))``, ``((i < layers))``. Integers of 64 bits, bounded work.

Source: POSIX.1-2024 Shell Command Language 2.6.4; the bash manual for ``**``, ``++`` and assignments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.topology.shell_values import State, Unknown, text_value

_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]+|[0-9]+)|(\$?\{?[A-Za-z_]\w*\}?)"
    r"|(<<=|>>=|\*\*|\+\+|--|&&|\|\||<<|>>|<=|>=|==|!=|[-+*/%&|^]=|[-+*/%<>=!~&|^?:(),]))"
)
_MAX_TOKENS = 400
_MAX_CHAIN = 32
_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", "<=", ">", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
    ("**",),
)


@dataclass(frozen=True, slots=True)
class NotKnown(Exception):
    """An expression whose value is not known, and why."""

    reason: str
    unknown: Unknown | None = None


def evaluate(expression: str, state: State, line: int) -> int:
    """The value of an expression; assignments in it change ``state``. Raises ``NotKnown``."""
    tokens: list[str] = []
    position = 0
    text = expression.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotKnown(f"{text[position : position + 20]!r} is not read in arithmetic")
        tokens.append(match.group().strip())
        position = match.end()
        if len(tokens) > _MAX_TOKENS:
            raise NotKnown(f"arithmetic of more than {_MAX_TOKENS} terms")
    state.tick(1 + len(tokens) // 8)
    if not tokens:
        return 0
    calculator = _Calculator(tokens, state, line)
    value = calculator.comma()
    if calculator.peek() is not None:
        raise NotKnown(f"{calculator.peek()!r} is not read in arithmetic")
    return value


def variable_value(name: str, state: State, line: int, chain: int = 0) -> int:
    """A variable as a number: its text may name another one. Raises ``NotKnown`` for an unset or unknown one."""
    value = state.scalar(name, line)
    if value.known is None:
        raise NotKnown(value.unknowns[0].reason or f"{name} is not known", value.unknowns[0])
    text = value.known.strip()
    if re.fullmatch(r"[-+]?[0-9]+", text):
        return _bounded(int(text[:40]))
    if not text:
        return 0
    if chain < _MAX_CHAIN and re.fullmatch(r"[A-Za-z_]\w*", text):
        return variable_value(text, state, line, chain + 1)
    raise NotKnown(f"{name} is {text[:40]!r}, no number")


class _Calculator:
    def __init__(self, tokens: list[str], state: State, line: int) -> None:
        self.tokens = tokens
        self.state = state
        self.line = line
        self.index = 0

    def peek(self, ahead: int = 0) -> str | None:
        at = self.index + ahead
        return self.tokens[at] if at < len(self.tokens) else None

    def take(self) -> str:
        token = self.peek()
        if token is None:
            raise NotKnown("arithmetic ends too early")
        self.index += 1
        return token

    def comma(self) -> int:
        value = self.assignment()
        while self.peek() == ",":
            self.take()
            value = self.assignment()
        return value

    def assignment(self) -> int:
        name, operator = self.peek(), self.peek(1)
        if (
            name
            and re.fullmatch(r"[A-Za-z_]\w*", name)
            and operator
            and re.fullmatch(r"([-+*/%&|^]|<<|>>)?=", operator)
        ):
            self.index += 2
            value = self.assignment()
            if operator != "=":
                value = _apply(operator[:-1], variable_value(name, self.state, self.line), value)
            self.state.assign(name, text_value(str(value), self.line))
            return value
        return self.conditional()

    def conditional(self) -> int:
        value = self.binary(0)
        if self.peek() != "?":
            return value
        self.take()
        yes = self.assignment()
        if self.take() != ":":
            raise NotKnown("? without : in arithmetic")
        no = self.conditional()
        return yes if value else no

    def binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self.unary()
        value = self.binary(level + 1)
        while (operator := self.peek()) in _LEVELS[level]:
            self.take()
            right = self.binary(level if operator == "**" else level + 1)
            value = _apply(operator or "", value, right)
        return value

    def unary(self) -> int:
        token = self.take()
        if token in ("++", "--") and (name := self.peek()) and re.fullmatch(r"[A-Za-z_]\w*", name):
            self.take()
            return self.step(name, 1 if token == "++" else -1)
        signs: dict[str, Callable[[int], int]] = {"-": int.__neg__, "+": int.__pos__, "!": lambda v: int(not v)}
        if token in signs:
            return _bounded(signs[token](self.unary()))
        if token == "~":
            return ~self.unary()
        if token == "(":
            value = self.comma()
            if self.take() != ")":
                raise NotKnown("a parenthesis is missing in arithmetic")
            return value
        if token[0].isdigit():
            base = 16 if token[:2].lower() == "0x" else 8 if token.startswith("0") and len(token) > 1 else 10
            try:
                return _bounded(int(token[:40], base))
            except ValueError:
                raise NotKnown(f"{token[:40]!r} is no number") from None
        name = token.strip("${}")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise NotKnown(f"{token!r} is not read in arithmetic")
        value = variable_value(name, self.state, self.line)
        if self.peek() in ("++", "--"):
            self.step(name, 1 if self.take() == "++" else -1)
        return value

    def step(self, name: str, by: int) -> int:
        value = _bounded(variable_value(name, self.state, self.line) + by)
        self.state.assign(name, text_value(str(value), self.line))
        return value


def _apply(operator: str, left: int, right: int) -> int:
    if operator in ("/", "%"):
        if right == 0:
            raise NotKnown("a division by zero")
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return _bounded(quotient if operator == "/" else left - quotient * right)
    if operator == "**" and not (0 <= right <= 64 and abs(left) < 1 << 32):
        raise NotKnown("a power beyond 64 bits")
    if operator in ("<<", ">>") and not 0 <= right < 64:
        raise NotKnown("a shift beyond 64 bits")
    results: dict[str, Callable[[int, int], int]] = {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "**": lambda a, b: a**b,
        "<<": lambda a, b: a << b,
        ">>": lambda a, b: a >> b,
        "&": lambda a, b: a & b,
        "|": lambda a, b: a | b,
        "^": lambda a, b: a ^ b,
        "&&": lambda a, b: int(bool(a and b)),
        "||": lambda a, b: int(bool(a or b)),
        "==": lambda a, b: int(a == b),
        "!=": lambda a, b: int(a != b),
        "<": lambda a, b: int(a < b),
        "<=": lambda a, b: int(a <= b),
        ">": lambda a, b: int(a > b),
        ">=": lambda a, b: int(a >= b),
    }
    return _bounded(results[operator](left, right))


def _bounded(value: int) -> int:
    """The value wrapped to 64 bits, as a shell's arithmetic is."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
