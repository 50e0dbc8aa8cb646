"""Words of a script after expansion, as far as they can be known without running anything.

A variable that the script sets has its value; ``${X:-y}`` of one that it does not set is y; the rest of what a shell
would compute (commands, files, the caller's environment) stays an `Unknown` with its line. Four kinds of command
substitution are plain text and are read: the body of ``cat <<EOF``, the words of ``echo``, the numbers of ``seq``, and
the script's own folder. Source: POSIX.1-2024 Shell Command Language 2.6; the bash manual for arrays and ``${x/a/b}``.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Sequence
from dataclasses import replace

from lockstep.topology.shell_arithmetic import NotKnown, evaluate
from lockstep.topology.shell_parse import parse_script
from lockstep.topology.shell_scan import Scanner
from lockstep.topology.shell_syntax import (
    MAX_NESTING,
    Arithmetic,
    Literal,
    Parameter,
    Part,
    ShellError,
    Simple,
    Substitution,
    Word,
)
from lockstep.topology.shell_values import (
    MAX_ELEMENTS,
    Entry,
    State,
    Unknown,
    Value,
    as_array,
    bounded,
    text_value,
    unknown_value,
)

_NAME = re.compile(r"([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([^\]]*)\])?")
_MANY = ("@", "*")


def expand(word: Word, state: State, depth: int = 0) -> list[Value]:
    """The fields that a word becomes: none for an empty expansion, several for an array or unquoted blanks."""
    state.tick()
    fields = _Fields(word.line)
    for part in word.parts:
        listed = isinstance(part, Parameter) and part.body.endswith(("[@]", "[*]"))
        for index, (value, quoted) in enumerate(_pieces(part, word.line, state, depth)):
            if index > 0:
                fields.close()
            fields.add(value, quoted=quoted, line=value.line if listed and value.line else word.line)
    fields.close()
    if len(fields.done) > MAX_ELEMENTS:
        raise ShellError(word.line, f"a word expands to more than {MAX_ELEMENTS} words")
    for value in fields.done:
        bounded(value)
    return fields.done


class _Fields:
    """Fields of a word while it is put together: field splitting at the blanks of unquoted expansions."""

    def __init__(self, line: int) -> None:
        self.done: list[Value] = []
        self.open: list[str | Unknown] | None = None
        self.line = line

    def close(self) -> None:
        """End the field that is open, if one is."""
        if self.open is not None:
            self.done.append(Value(tuple(part for part in self.open if part != ""), self.line))
        self.open = None

    def extend(self, *parts: str | Unknown, line: int) -> None:
        """Add to the open field, which begins here if none is."""
        if self.open is None:
            self.open, self.line = [], line
        self.open.extend(parts)

    def add(self, value: Value, *, quoted: bool, line: int) -> None:
        """Add a piece, split at blanks unless it is quoted."""
        if quoted:
            self.extend(*value.parts, line=line)
            return
        for part in value.settled().parts:
            if isinstance(part, Unknown):
                self.extend(replace(part, several=True), line=line)
                continue
            for piece in re.split(r"([ \t\n]+)", part):
                if piece.isspace():
                    self.close()
                elif piece:
                    self.extend(piece, line=line)


def expand_text(word: Word, state: State, depth: int = 0) -> Value:
    """The one text that a word becomes where nothing is split: in assignments, tests and here-documents."""
    parts: list[str | Unknown] = []
    for part in word.parts:
        for index, (value, _) in enumerate(_pieces(part, word.line, state, depth)):
            parts += ([" "] if index else []) + list(value.parts)
    value = Value(tuple(part for part in parts if part != ""), word.line)
    bounded(value)
    return value


def expand_elements(words: Sequence[Word], state: State, depth: int = 0) -> tuple[Value, ...]:
    """The elements of ``name=(…)``."""
    return tuple(value for word in words for value in expand(word, state, depth))


def _pieces(part: Part, line: int, state: State, depth: int) -> list[tuple[Value, bool]]:
    """The texts of one part with whether each is protected from splitting; several for an array."""
    if depth > MAX_NESTING:
        raise ShellError(line, f"expansions nested deeper than {MAX_NESTING}")
    if isinstance(part, Literal):
        return [(text_value(part.text, line), True)]
    if isinstance(part, Arithmetic):
        return [(calculate(part, line, state, depth), True)]
    if isinstance(part, Substitution):
        return [(_substitute(part, line, state, depth), part.quoted)]
    return _parameter(part, line, state, depth)


def calculate(part: Arithmetic, line: int, state: State, depth: int = 0) -> Value:
    """An arithmetic expansion: its expression is expanded first, as a shell does."""
    inner = Word(tuple(Scanner(part.body, line, depth + 1).quoted(None)), line)
    expression = expand_text(inner, state, depth + 1)
    if expression.known is None:
        piece = replace(expression.unknowns[0], source=part.source, line=line, assumed=None, several=False)
        return Value((piece,), line)
    try:
        return text_value(str(evaluate(expression.known, state, line)), line)
    except NotKnown as error:
        variable = error.unknown.variable if error.unknown else ""
        return unknown_value(part.source, line, variable, error.reason)


def _parameter(part: Parameter, line: int, state: State, depth: int) -> list[tuple[Value, bool]]:
    body = part.body
    if body.startswith("#") and len(body) > 1:
        return [(_length(part, line, state), True)]
    if body.startswith("!"):
        return [(_indirect(part, line, state), part.quoted)]
    match = _NAME.match(body)
    if match is None:
        return [(unknown_value(part.source, line, reason="this expansion is not read"), part.quoted)]
    name, index = match.group(1), match.group(2)
    rest = body[match.end() :]
    if (index in _MANY or name in _MANY) and not rest:
        values = _all_of(name, part, line, state)
        if part.quoted and "*" in (name, index):
            return [(_joined(values, state, line), True)]
        if part.quoted:
            return [(value, True) for value in values]
        return [(value, False) for value in values]
    value, is_set = _lookup(name, index, part, line, state)
    if rest:
        value = _modified(part, name, value, is_set, rest, line, state, depth)
    return [(value, part.quoted)]


def _all_of(name: str, part: Parameter, line: int, state: State) -> tuple[Value, ...]:
    if name in _MANY:
        return state.positional or ()
    entry = state.get(name)
    if entry is None:
        reason = f"nothing in the script sets the array {name}"
        return (Value((Unknown(part.source, line, name, reason, assumed="", several=True),), line),)
    return as_array(entry)


def _joined(values: Sequence[Value], state: State, line: int) -> Value:
    separator = state.get("IFS")
    between = (separator.known or "")[:1] if isinstance(separator, Value) else " "
    parts: list[str | Unknown] = []
    for index, value in enumerate(values):
        parts += ([between] if index and between else []) + list(value.parts)
    return Value(tuple(parts), line)


def _lookup(name: str, index: str | None, part: Parameter, line: int, state: State) -> tuple[Value, bool]:
    """A variable's value and whether the script sets it."""
    if name.isdigit():
        number = int(name[:6])
        if number == 0 or (name in state.given):
            known = state.given.get(name) or state.script
            return (text_value(known, line), True) if known else (unknown_value("$0", line), True)
        given = state.positional or ()
        if number <= len(given):
            return given[number - 1], True
        reason = f"argument {number} of the script is not given"
        return unknown_value(part.source, line, name, reason, assumed=""), False
    if name == "#":
        if state.positional is not None:
            return text_value(str(len(state.positional)), line), True
        return unknown_value("$#", line, reason="the script's arguments are not given", assumed="0"), True
    if name == "BASH_SOURCE":
        return (text_value(state.script, line), True) if state.script else (unknown_value(part.source, line), True)
    if not (name[0].isalpha() or name[0] == "_"):
        return unknown_value(part.source, line, reason="only a running shell knows it"), True
    entry = state.get(name)
    if entry is None:
        unset = state.scalar(name, line)
        return Value((replace(unset.unknowns[0], source=part.source),), line), False
    if index in (None, "0"):
        return state.scalar(name, line), True
    if isinstance(entry, tuple) and index not in _MANY:
        try:
            return entry[evaluate(index or "0", state, line)], True
        except (NotKnown, IndexError):
            return unknown_value(part.source, line, reason="the index is not known"), True
    return _joined(as_array(entry), state, line), True


def _modified(
    part: Parameter, name: str, value: Value, is_set: bool, rest: str, line: int, state: State, depth: int
) -> Value:
    """``${name…}`` with an operator behind the name."""
    match = re.match(r":?[-=+?]", rest)
    if match:
        operator, argument = match.group(), rest[match.end() :]
        empty = not is_set or (operator.startswith(":") and value.known == "")
        if operator[-1] == "+":
            return Value() if empty else _argument(argument, line, state, depth)
        if not empty:
            return value
        if operator[-1] == "?":
            return value if value.unknowns else unknown_value(part.source, line, name, f"{name} must not be empty")
        default = _argument(argument, line, state, depth)
        if not is_set and default.known is not None and operator[-1] == "-":
            reason = f"nothing in the script sets {name}"
            return Value((Unknown(part.source, line, name, reason, default.known, optional=True),), line)
        if operator[-1] == "=" and not name.isdigit():
            state.assign(name, default)
        return default
    text = value.known
    if text is None:
        return Value((replace(value.unknowns[0], source=part.source, line=line, assumed=None),), line)
    changed = _edited(text, rest, line, state, depth)
    if changed is None:
        return unknown_value(part.source, line, reason="this expansion is not read")
    return text_value(changed, line)


def _edited(text: str, rest: str, line: int, state: State, depth: int) -> str | None:
    """Prefix and suffix removal, replacement, substrings and case of a known text; None for what is not read."""
    if rest[0] in "#%":
        longest = rest[1:2] == rest[0]
        pattern = _argument(rest[2 if longest else 1 :], line, state, depth).known
        return None if pattern is None else _trim(text, pattern, front=rest[0] == "#", longest=longest)
    if rest[0] == "/":
        everywhere = rest[1:2] == "/"
        old, _, new = rest[2 if everywhere else 1 :].partition("/")
        old_text = _argument(old, line, state, depth).known
        new_text = _argument(new, line, state, depth).known
        if not old_text or new_text is None or any(char in old_text for char in "*?[#%"):
            return None
        return text.replace(old_text, new_text, -1 if everywhere else 1)
    if rest in ("^^", ",,", "^", ","):
        change = str.upper if rest[0] == "^" else str.lower
        return change(text) if len(rest) == 2 else change(text[:1]) + text[1:]
    match = re.fullmatch(r":\s*(-?\w+)(?::\s*(\w+))?", rest)
    if match is None or rest.startswith(":-"):
        return None
    try:
        offset = evaluate(match.group(1), state, line)
        length = evaluate(match.group(2), state, line) if match.group(2) else len(text)
    except NotKnown:
        return None
    start = offset if offset >= 0 else max(0, len(text) + offset)
    return text[start : start + length]


def _trim(text: str, pattern: str, *, front: bool, longest: bool) -> str:
    """A text without the shortest or longest beginning (or end) that matches a pattern."""
    if len(text) > 4096:
        return text
    lengths = range(len(text) + 1)
    for length in reversed(lengths) if longest else lengths:
        piece = text[:length] if front else text[len(text) - length :]
        if fnmatch.fnmatchcase(piece, pattern):
            return text[length:] if front else text[: len(text) - length]
    return text


def _argument(text: str, line: int, state: State, depth: int) -> Value:
    """The word behind an operator of ``${…}``, expanded but not split."""
    if depth >= MAX_NESTING:
        raise ShellError(line, f"expansions nested deeper than {MAX_NESTING}")
    scanner = Scanner(text, line, depth + 1)
    parts: list[Part] = []
    while scanner.position < len(text):
        piece = scanner._part(text[scanner.position])
        parts += [Literal(piece)] if isinstance(piece, str) else piece
    return expand_text(Word(tuple(parts), line), state, depth + 1)


def _length(part: Parameter, line: int, state: State) -> Value:
    match = _NAME.fullmatch(part.body[1:])
    if match is None:
        return unknown_value(part.source, line, reason="this expansion is not read")
    name, index = match.group(1), match.group(2)
    entry: Entry | None = (state.positional or ()) if name in _MANY else state.get(name)
    if index in _MANY or name in _MANY:
        values = as_array(entry) if entry is not None else ()
        if any(unknown.several for value in values for unknown in value.unknowns):
            return unknown_value(part.source, line, name, "the array's length is not known")
        return text_value(str(len(values)), line)
    value = state.scalar(name, line)
    known = value.assumed
    return text_value(str(len(known)), line) if known is not None else unknown_value(part.source, line, name)


def _indirect(part: Parameter, line: int, state: State) -> Value:
    """``${!name}``: the variable that another one names."""
    name = part.body[1:]
    target = state.scalar(name, line).known if re.fullmatch(r"[A-Za-z_]\w*", name) else None
    if target and re.fullmatch(r"[A-Za-z_]\w*", target):
        return state.scalar(target, line)
    return unknown_value(part.source, line, reason="this expansion is not read")


def _substitute(part: Substitution, line: int, state: State, depth: int) -> Value:
    """A command substitution: the four kinds that are plain text, else unknown."""
    unknown = unknown_value(" ".join(part.source.split())[:200], line, reason="a command's output: nothing is run")
    if depth >= MAX_NESTING or part.source.startswith(("<(", ">(")):
        return unknown
    if re.search(r"BASH_SOURCE|\$0|\$\{0", part.body) and re.search(r"\b(dirname|pwd|realpath|readlink)\b", part.body):
        return text_value(state.directory, line) if state.directory is not None else unknown
    try:
        block = parse_script(part.body, line, depth + 1)
    except ShellError:
        return unknown
    inner = state.copy()
    for index, chain in enumerate(block.chains):
        command = chain.first.commands[0]
        if chain.rest or len(chain.first.commands) > 1 or not isinstance(command, Simple):
            return unknown
        if index == len(block.chains) - 1:
            return _output(command, inner, line, depth + 1) or unknown
        for word in command.words:
            match = re.match(r"([A-Za-z_]\w*)=", word.parts[0].text if isinstance(word.parts[0], Literal) else "")
            if match is None:
                return unknown
            cut = Literal(word.parts[0].text[match.end() :])  # type: ignore[union-attr]
            inner.assign(match.group(1), expand_text(Word((cut, *word.parts[1:]), line), inner, depth + 1))
    return unknown


def _output(command: Simple, state: State, line: int, depth: int) -> Value | None:
    """What ``cat <<EOF``, ``echo``, ``seq``, ``basename`` and ``dirname`` print, None for anything else."""
    fields = [field for word in command.words for field in expand(word, state, depth)]
    name = fields[0].known if fields else None
    rest = fields[1:]
    if name == "cat" and not rest and len(command.redirects) == 1:
        redirect = command.redirects[0]
        if redirect.operator in ("<<", "<<-", "<<<"):
            value = expand_text(redirect.word, state, depth)
            last = value.parts[-1] if value.parts else ""
            return Value((*value.parts[:-1], last.rstrip("\n")), line) if isinstance(last, str) else value
    if command.redirects:
        return None
    if name == "echo":
        rest = rest[1:] if rest and rest[0].known in ("-n", "-e") else rest
        return _joined(rest, State(), line)
    known = [field.known for field in rest]
    if name in ("basename", "dirname") and len(known) == 1 and known[0]:
        path = known[0].rstrip("/") or "/"
        return text_value(posixpath.basename(path) if name == "basename" else posixpath.dirname(path) or ".", line)
    if name == "seq" and 1 <= len(known) <= 3 and all(text and re.fullmatch(r"-?[0-9]{1,9}", text) for text in known):
        numbers = [int(text or 0) for text in known]
        first, step, last = (1, 1, *numbers) if len(numbers) == 1 else (numbers[0], 1, numbers[-1])
        step = numbers[1] if len(numbers) == 3 else step
        if step == 0 or abs((last - first) // step) > 4096:
            return None
        return text_value("\n".join(str(n) for n in range(first, last + (1 if step > 0 else -1), step)), line)
    return None
