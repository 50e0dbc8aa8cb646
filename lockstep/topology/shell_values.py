"""What a reader knows of a shell's variables: texts, arrays, and what can't be known without running something."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

MAX_TEXT = 1 << 18
MAX_ELEMENTS = 20_000
MAX_STEPS = 30_000


@dataclass(frozen=True, slots=True)
class Unknown:
    """A piece that only a running shell would know.

    ``source`` is its text in the script, ``line`` where it stands, ``variable`` the name whose value would settle it
    ("" if none would). ``assumed`` is what tests take it for (a variable that nobody sets is taken as unset).
    ``several``: unquoted, it may be any number of words. ``optional``: ``${X:-y}``, which is y as the script stands;
    only tests treat it as uncertain.
    """

    source: str
    line: int
    variable: str = ""
    reason: str = ""
    assumed: str | None = None
    several: bool = False
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Value:
    """A word after expansion: text and unknown pieces in order, and the line that it comes from."""

    parts: tuple[str | Unknown, ...] = ()
    line: int = 0

    @property
    def unknowns(self) -> tuple[Unknown, ...]:
        """What is not known of it."""
        return tuple(part for part in self.parts if isinstance(part, Unknown) and not part.optional)

    @property
    def certain(self) -> bool:
        """Whether no piece could be otherwise in another environment."""
        return all(isinstance(part, str) for part in self.parts)

    @property
    def known(self) -> str | None:
        """The text, None if a piece is unknown."""
        return None if self.unknowns else self.text

    @property
    def text(self) -> str:
        """The text with unknown pieces as the script writes them."""
        return "".join(piece if isinstance(piece, str) else piece.source for piece in map(_settled, self.parts))

    def settled(self) -> Value:
        """The value with its defaults as plain text."""
        return self if self.certain else Value(tuple(p for p in map(_settled, self.parts) if p != ""), self.line)

    @property
    def assumed(self) -> str | None:
        """The text that tests take it for, None if there is no assumption for a piece."""
        pieces = [part if isinstance(part, str) else part.assumed for part in self.parts]
        return None if None in pieces else "".join(piece for piece in pieces if piece is not None)


def _settled(part: str | Unknown) -> str | Unknown:
    return part.assumed or "" if isinstance(part, Unknown) and part.optional else part


Entry = Value | tuple[Value, ...]
"""A variable's content: a text or an array."""


def text_value(text: str, line: int = 0) -> Value:
    """A known text."""
    return Value((text,) if text else (), line)


def unknown_value(source: str, line: int, variable: str = "", reason: str = "", assumed: str | None = None) -> Value:
    """A text of which nothing is known."""
    return Value((Unknown(source, line, variable, reason, assumed),), line)


class Overflow(Exception):
    """A script that is beyond the reader's bounds: a text, an array or a number of steps."""


@dataclass(slots=True)
class State:
    """A shell at one point of a script.

    ``given`` are values that the user states (they win over the script's own assignments); ``positional`` the
    arguments (None: the script's own, taken as none); ``script`` and ``directory`` of ``$0``, None if unknown.
    """

    given: Mapping[str, str] = field(default_factory=dict)
    variables: dict[str, Entry] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    positional: tuple[Value, ...] | None = None
    script: str | None = None
    directory: str | None = None
    steps: list[int] = field(default_factory=lambda: [0])

    def copy(self) -> State:
        """A shell of its own with the same content; the count of steps is shared."""
        return replace(self, variables=dict(self.variables), exported=set(self.exported))

    def tick(self, cost: int = 1) -> None:
        """Count work; raises ``Overflow`` beyond the bound."""
        self.steps[0] += cost
        if self.steps[0] > MAX_STEPS:
            raise Overflow(f"more than {MAX_STEPS} steps")

    def get(self, name: str) -> Entry | None:
        """A variable's content, None if nothing sets it."""
        if name in self.given:
            return text_value(self.given[name])
        return self.variables.get(name)

    def scalar(self, name: str, line: int) -> Value:
        """A variable as text: an array's first element; unknown if nothing sets it."""
        entry = self.get(name)
        if entry is None:
            reason = f"nothing in the script sets {name}"
            return unknown_value(f"${{{name}}}", line, name, reason, assumed="")
        if isinstance(entry, tuple):
            return entry[0] if entry else Value()
        return entry

    def assign(self, name: str, entry: Entry, *, append: bool = False) -> None:
        """Set or, with ``append``, extend a variable."""
        old = self.variables.get(name)
        if append and old is not None:
            if isinstance(old, tuple) or isinstance(entry, tuple):
                entry = (*as_array(old), *as_array(entry))
            else:
                entry = Value((*old.parts, *entry.parts), entry.line)
        self.variables[name] = bounded(entry)
        self.tick()


def as_array(entry: Entry) -> tuple[Value, ...]:
    """The content as an array."""
    return entry if isinstance(entry, tuple) else (entry,)


def bounded(entry: Entry) -> Entry:
    """The entry itself; raises ``Overflow`` when it is beyond the bounds."""
    values = as_array(entry)
    if len(values) > MAX_ELEMENTS:
        raise Overflow(f"an array of more than {MAX_ELEMENTS} elements")
    if sum(len(part) for value in values for part in value.parts if isinstance(part, str)) > MAX_TEXT:
        raise Overflow(f"a value of more than {MAX_TEXT} characters")
    if sum(len(value.parts) for value in values) > MAX_ELEMENTS:
        raise Overflow(f"a value of more than {MAX_ELEMENTS} pieces")
    return entry


def join_states(state: State, others: Iterable[State], line: int) -> None:
    """What is known after a condition that isn't: ``state`` takes what all ``others`` agree on."""
    states = list(others)
    names = {name for other in states for name in other.variables}
    for name in names:
        entries = [other.variables.get(name) for other in states]
        if all(entry == entries[0] for entry in entries) and entries[0] is not None:
            state.variables[name] = entries[0]
        else:
            state.variables[name] = _either(name, entries, line)
    state.exported |= {name for other in states for name in other.exported}


def _either(name: str, entries: list[Entry | None], line: int) -> Entry:
    reason = f"depends on the condition of line {line}"
    if not any(isinstance(entry, tuple) for entry in entries):
        shown = [entry.text if isinstance(entry, Value) else "unset" for entry in entries]
        if len({*shown}) <= 3:
            reason = f"is {' or '.join(sorted({*shown}))}: it {reason}"
        assumed = "" if None in entries else None
        return Value((Unknown(f"${{{name}}}", line, name, reason, assumed),), line)
    arrays = [as_array(entry) if entry is not None else () for entry in entries]
    common: list[Value] = []
    for values in zip(*arrays, strict=False):
        if any(value != values[0] for value in values):
            break
        common.append(values[0])
    rest = Unknown(f"${{{name}[@]}}", line, name, f"more of {name} {reason}", assumed="", several=True)
    return (*common, Value((rest,), line))
