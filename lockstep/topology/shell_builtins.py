"""Simple commands of a script: assignments, the shell's own commands, and everything else, which is recorded."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.topology.shell_arithmetic import NotKnown, evaluate
from lockstep.topology.shell_syntax import Literal, Redirect, ShellError, Simple, Word
from lockstep.topology.shell_tests import NO, RAN, YES, judge
from lockstep.topology.shell_values import Unknown, Value, text_value, unknown_value
from lockstep.topology.shell_words import expand, expand_elements, expand_text

if TYPE_CHECKING:
    from lockstep.topology.shell_script import Flow, Follower

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=")
_DECLARES = ("export", "declare", "typeset", "local", "readonly")
_SHELLS = ("bash", "sh", "zsh", "dash")
MAX_SOURCES = 256


def simple(follower: Follower, command: Simple) -> Flow:
    """Follow a simple command; records it where it is no command of the shell itself."""
    from lockstep.topology.shell_script import Invocation

    state = follower.state
    words = list(command.words)
    prefix: list[Word] = []
    while words and _assignment(words[0]):
        prefix.append(words.pop(0))
    if not words:
        for word in prefix:
            assign(follower, word)
        follower.verdict = YES
        return None
    if words[0].plain in _DECLARES:
        return _declare(follower, words)
    fields = [value for word in words for value in expand(word, state)]
    if not fields:
        follower.verdict = YES
        return None
    if len(fields) > 2 and fields[0].known == "command" and fields[1].known in ("-v", "-V"):
        follower.verdict = RAN
        return None
    while len(fields) > 1 and fields[0].known in ("command", "builtin", "exec", "nohup"):
        fields = fields[1:]
    name = fields[0].known
    if name in follower.functions:
        return follower.call(name, tuple(fields[1:]))
    if name in _BUILTINS:
        return _BUILTINS[name](follower, fields[1:], command.redirects)
    if name and re.match(r"--?[a-zA-Z]", name):
        follower.found.detached.append((command.line, " ".join(value.text for value in fields[:3])))
    environment = {key: state.scalar(key, command.line).settled() for key in sorted(state.exported)}
    own: list[Value] = []
    for word in prefix:
        key, value = _temporary(follower, word)
        environment[key] = value.settled()
        own.append(Value((f"{key}=", *value.parts), word.line))
    started = tuple(field.settled() for field in fields)
    follower.found.invocations.append(Invocation(started, environment, command.line, follower.outer))
    follower.verdict = RAN
    return _inner_scripts(follower, fields, command.redirects, own)


def _assignment(word: Word) -> re.Match[str] | None:
    first = word.parts[0] if word.parts else None
    return _ASSIGNMENT.match(first.text) if isinstance(first, Literal) and not first.quoted else None


def _content(follower: Follower, word: Word, match: re.Match[str]) -> Value:
    first = word.parts[0]
    rest = Literal(first.text[match.end() :]) if isinstance(first, Literal) else first
    return expand_text(Word((rest, *word.parts[1:]), word.line), follower.state)


def _temporary(follower: Follower, word: Word) -> tuple[str, Value]:
    match = _assignment(word)
    assert match is not None
    return match.group(1), _content(follower, word, match)


def assign(follower: Follower, word: Word) -> None:
    """``name=value``, ``name+=value``, ``name=(…)`` or ``name[i]=value``."""
    match = _assignment(word)
    if match is None:
        return
    name, index, append = match.group(1), match.group(2), bool(match.group(3))
    state = follower.state
    if word.elements is not None:
        state.assign(name, expand_elements(word.elements, state), append=append)
        return
    value = _named(name, _content(follower, word, match))
    if index is None:
        state.assign(name, value, append=append)
        return
    entry = state.variables.get(name)
    elements = list(entry) if isinstance(entry, tuple) else []
    try:
        position = evaluate(index, state, word.line)
    except NotKnown:
        position = -1
    if 0 <= position < len(elements):
        elements[position] = value
        state.assign(name, tuple(elements))
    elif position == len(elements):
        state.assign(name, (*elements, value))
    else:
        source = f"${{{name}[@]}}"
        reason = f"line {word.line} sets an element of {name} by a key"
        state.assign(name, (Value((Unknown(source, word.line, name, reason, None, True),), word.line),))


def _named(name: str, value: Value) -> Value:
    """The value, with the variable as what would settle a piece that no other variable does."""
    parts = tuple(
        replace(part, variable=name) if isinstance(part, Unknown) and not part.variable else part
        for part in value.parts
    )
    return Value(parts, value.line)


def _declare(follower: Follower, words: Sequence[Word]) -> Flow:
    """``export`` and its like."""
    kind = words[0].plain
    flags = [word.plain or "" for word in words[1:] if (word.plain or "").startswith("-")]
    exports = kind == "export" or any("x" in flag for flag in flags if kind in ("declare", "typeset"))
    unexports = kind == "export" and any("n" in flag for flag in flags)
    state = follower.state
    for word in words[1:]:
        match = _assignment(word)
        if match is not None:
            assign(follower, word)
            names = [match.group(1)]
        else:
            names = [_declared(follower, value) for value in expand(word, state)]
        for name in names:
            if name and exports:
                (state.exported.discard if unexports else state.exported.add)(name)
    follower.verdict = YES
    return None


def _declared(follower: Follower, value: Value) -> str:
    """The name in ``export "name=value"`` or ``export name``."""
    first = value.parts[0] if value.parts else ""
    match = _ASSIGNMENT.match(first) if isinstance(first, str) else None
    if match is not None and isinstance(first, str):
        rest = tuple(part for part in (first[match.end() :], *value.parts[1:]) if part != "")
        follower.state.assign(match.group(1), Value(rest, value.line))
        return match.group(1)
    return value.known or "" if re.fullmatch(r"[A-Za-z_]\w*", value.known or "") else ""


def _inner_scripts(
    follower: Follower, fields: Sequence[Value], redirects: Sequence[Redirect], own: Sequence[Value]
) -> Flow:
    """Scripts in the words or the input of a command: ``bash -c "…"``, ``ssh host "…"``, ``bash <<EOF``. ``own``: the
    variables that are set for it, as words."""
    if follower.marker is None:
        return None
    names = {(field.known or "").rpartition("/")[2] for field in fields}
    runs_shell = bool(names & {*_SHELLS, "ssh", "srun", "tmux", "screen", "docker", "kubectl", "sbatch", "parallel"})
    if not runs_shell:
        return None
    texts = [field for field in fields[1:] if re.search(r"\s", field.text)]
    around = {id(field): (*own, *fields[:index]) for index, field in enumerate(fields)}
    if fields[0].known and fields[0].known.rpartition("/")[2] in (*_SHELLS, "ssh", "srun", "sbatch"):
        texts += [expand_text(r.word, follower.state) for r in redirects if r.operator in ("<<", "<<-", "<<<")]
    for text in texts:
        if follower.marker.search(text.text):
            follower.nested(text.text, text.line, own_shell=True, outer=around.get(id(text), (*own, *fields)))
    follower.verdict = RAN
    return None


def _source(follower: Follower, fields: Sequence[Value], redirects: Sequence[Redirect]) -> Flow:
    """``source``: the file's commands if it is here; ``/dev/stdin`` reads the here-document."""
    follower.verdict = RAN
    documents = [r for r in redirects if r.operator in ("<<", "<<-", "<<<")]
    if documents and fields and fields[0].known == "/dev/stdin":
        text = expand_text(documents[0].word, follower.state)
        return follower.nested(text.text, text.line, own_shell=False)
    path = fields[0] if fields else text_value("")
    text = follower.load(path.known) if follower.load and path.known else None
    if text is None:
        follower.found.missing.append((path.text, path.line))
        return None
    follower.sources += 1
    if follower.sources > MAX_SOURCES:  # files that source each other twice would double at every level
        raise ShellError(path.line, f"more than {MAX_SOURCES} files are sourced")
    flow = follower.nested(text, 1, own_shell=False)
    return None if flow == "return" else flow


def _eval(follower: Follower, fields: Sequence[Value], redirects: Sequence[Redirect]) -> Flow:
    text = " ".join(field.text for field in fields)
    follower.verdict = RAN
    try:
        return follower.nested(text, fields[0].line, own_shell=False) if fields else None
    except ShellError:
        return None


def _read(follower: Follower, fields: Sequence[Value], redirects: Sequence[Redirect]) -> Flow:
    """``read``: of a here-string that is known, else its variables are unknown."""
    names = [f.known or "" for f in fields if re.fullmatch(r"[A-Za-z_]\w*", f.known or "")]
    options = "".join(f.known or "" for f in fields if (f.known or "").startswith("-"))
    strings = [redirect for redirect in redirects if redirect.operator in ("<<<", "<<", "<<-")]
    content = expand_text(strings[0].word, follower.state) if strings else None
    for name in names:
        if content is None or content.known is None or (len(names) > 1 and "a" not in options):
            line = fields[0].line
            reason = content.unknowns[0].reason if content and content.unknowns else "it is read when the script runs"
            missing = Unknown(content.text if content else f"${{{name}}}", line, name, reason, None, True)
            value = Value((missing,), line)
            follower.state.assign(name, (value,) if "a" in options else value)
        elif "a" in options:
            follower.state.assign(name, tuple(text_value(t, content.line) for t in content.known.split()))
        else:
            follower.state.assign(name, text_value(content.known.strip(), content.line))
    follower.verdict = RAN
    return None


def _printf(follower: Follower, fields: Sequence[Value], redirects: Sequence[Redirect]) -> Flow:
    """``printf -v name format words``, with ``%s`` and ``%d`` only."""
    follower.verdict = RAN
    if len(fields) < 3 or fields[0].known != "-v" or not fields[1].known:
        return None
    name, form, rest = fields[1].known, fields[2].known, list(fields[3:])
    pieces = re.split(r"%[sd]", form) if form is not None else []
    if form is None or "%" in "".join(pieces) or len(pieces) != len(rest) + 1:
        follower.state.assign(name, unknown_value(f"${{{name}}}", fields[0].line, name, "printf builds it"))
        return None
    parts: list[str | Unknown] = [pieces[0].replace("\\n", "\n")]
    for value, piece in zip(rest, pieces[1:], strict=True):
        parts += [*value.parts, piece.replace("\\n", "\n")]
    follower.state.assign(name, Value(tuple(part for part in parts if part != ""), fields[0].line))
    return None


def _set(follower: Follower, fields: Sequence[Value], redirects: Sequence[Redirect]) -> Flow:
    known = [field.known for field in fields]
    if "--" in known:
        follower.state.positional = tuple(fields[known.index("--") + 1 :])
    follower.verdict = YES
    return None


def _shift(follower: Follower, fields: Sequence[Value], redirects: Sequence[Redirect]) -> Flow:
    count = fields[0].known if fields else "1"
    if follower.state.positional and count and count.isdigit():
        follower.state.positional = follower.state.positional[int(count[:4]) :]
    follower.verdict = RAN
    return None


def _unset(follower: Follower, fields: Sequence[Value], redirects: Sequence[Redirect]) -> Flow:
    for field in fields:
        follower.state.variables.pop(field.known or "", None)
        follower.state.exported.discard(field.known or "")
    follower.verdict = YES
    return None


def _test(follower: Follower, fields: Sequence[Value], redirects: Sequence[Redirect]) -> Flow:
    terms = fields[:-1] if fields and fields[-1].known == "]" else fields
    follower.verdict = judge(terms, follower.state, patterns=False)
    return None


def _let(follower: Follower, fields: Sequence[Value], redirects: Sequence[Redirect]) -> Flow:
    for field in fields:
        follower.verdict = follower.calculation(field.known or "", field.line)
    return None


def _mapfile(follower: Follower, fields: Sequence[Value], redirects: Sequence[Redirect]) -> Flow:
    name = fields[-1].known if fields else None
    if name and re.fullmatch(r"[A-Za-z_]\w*", name):
        reason = "it is read when the script runs"
        line = fields[0].line
        follower.state.assign(name, (Value((Unknown(f"${{{name}[@]}}", line, name, reason, None, True),), line),))
    follower.verdict = RAN
    return None


def _ends(flow: str) -> Callable[[Follower, Sequence[Value], Sequence[Redirect]], Flow]:
    def leave(follower: Follower, fields: Sequence[Value], redirects: Sequence[Redirect]) -> Flow:
        return flow

    return leave


def _succeeds(follower: Follower, fields: Sequence[Value], redirects: Sequence[Redirect]) -> Flow:
    follower.verdict = YES
    return None


def _fails(follower: Follower, fields: Sequence[Value], redirects: Sequence[Redirect]) -> Flow:
    follower.verdict = NO
    return None


_BUILTINS: dict[str, Callable[[Follower, Sequence[Value], Sequence[Redirect]], Flow]] = {
    "source": _source,
    ".": _source,
    "eval": _eval,
    "read": _read,
    "printf": _printf,
    "set": _set,
    "shift": _shift,
    "unset": _unset,
    "test": _test,
    "[": _test,
    "let": _let,
    "mapfile": _mapfile,
    "readarray": _mapfile,
    **{flow: _ends(flow) for flow in ("exit", "return", "break", "continue")},
    **dict.fromkeys((":", "true", "trap", "shopt", "ulimit", "wait", "cd", "umask", "echo"), _succeeds),
    "false": _fails,
}
