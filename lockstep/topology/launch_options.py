"""A program's words as options: argparse flags and hydra overrides, with each one's line and what is not known."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.config.secrets import masked_command, masked_option
from lockstep.topology.launch_flags import NotRead, Row, abbreviated, known_flags, lookup, nearest_flag
from lockstep.topology.records import Finding
from lockstep.topology.shell_values import Unknown, Value

_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")


@dataclass(frozen=True, slots=True)
class Option:
    """One option as it was given: its flag, its values (none for a switch) and its line."""

    flag: str
    values: tuple[Value, ...]
    line: int

    @property
    def values_text(self) -> list[str]:
        """What it was given, as it stands in the script."""
        return [value.text for value in self.values]

    @property
    def text(self) -> str:
        """As one would type it, a secret masked."""
        return " ".join([self.flag, *(masked_option(self.flag, value.text) for value in self.values)])


@dataclass(slots=True)
class Options:
    """Options of a program.

    ``settings``: value by the rows' target; ``by_flag``: the last option of each flag; ``origins``: the option that a
    setting comes from; ``positional``: words that belong to no flag; ``opaque``: words that may hold any number of
    options; ``unread``: flags that exist and have no row; ``unsettled``: those with a row whose value is not known.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    by_flag: dict[str, Option] = field(default_factory=dict)
    origins: dict[str, Option] = field(default_factory=dict)
    positional: list[Value] = field(default_factory=list)
    opaque: list[Unknown] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    unsettled: dict[str, Option] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def read_flags(
    words: Sequence[Value],
    rows: Mapping[str, Row],
    project: str,
    given: Mapping[str, str],
    *,
    underscores: bool = False,
) -> Options:
    """Read argparse flags. ``given`` settles flags by name; ``underscores``: the parser takes ``_`` for ``-``."""
    options = Options()
    table = lookup(rows)
    for option in _flags(words, options, table):
        loose = underscores and option.flag.startswith("--")
        flag = f"--{option.flag[2:].replace('_', '-')}" if loose else option.flag
        _add(options, Option(flag, option.values, option.line), table, project)
    for name, value in given.items():
        if name.startswith("-"):
            options.unsettled.pop(name, None)
            _add(options, Option(name, (Value((value,)),) if value else (), 0), table, project)
    return options


def read_overrides(words: Sequence[Value], rows: Mapping[str, Row], given: Mapping[str, str]) -> Options:
    """Read hydra overrides ``a.b=c``, ``+a.b=c``; flags of hydra's own (``--config-name``) are options too."""
    options = Options()
    plain: list[Value] = []
    for word in words:
        first = word.parts[0] if word.parts else ""
        match = re.match(r"(\+{0,2})([A-Za-z_][\w.@/]*)=", first) if isinstance(first, str) else None
        if match is None:
            plain.append(word)
            continue
        rest = first[match.end() :] if isinstance(first, str) else ""
        value = Value(tuple(part for part in (rest, *word.parts[1:]) if part != ""), word.line)
        option = Option(match.group(2), (_unquoted(value),), word.line)
        _add(options, option, dict(rows), "verl", added=bool(match.group(1)))
    for option in _flags(plain, options, {}):
        options.by_flag[option.flag] = option
    for name, value in given.items():
        if "." in name:
            options.unsettled.pop(name, None)
            _add(options, Option(name, (Value((value,)),), 0), dict(rows), "verl", added=True)
    return options


def _unquoted(value: Value) -> Value:
    """Without the quotes that hydra's own grammar allows around a value."""
    known = value.known
    if known and len(known) > 1 and known[0] == known[-1] and known[0] in "'\"":
        return Value((known[1:-1],), value.line)
    return value


def _flags(words: Sequence[Value], options: Options, table: Mapping[str, Row]) -> Iterator[Option]:
    flag: str | None = None
    values: list[Value] = []
    line = 0
    for word in words:
        first = word.parts[0] if word.parts else ""
        name = _FLAG.match(first) if isinstance(first, str) else None
        ends = name.end() if name is not None else 0
        if isinstance(first, str) and name is not None and (ends == len(word.text) or first[ends : ends + 1] == "="):
            if flag is not None:
                yield Option(flag, tuple(values), line)
            flag, values, line = name.group(), [], word.line
            if len(first) > ends:
                rest = first[ends + 1 :]
                values = [Value(tuple(part for part in (rest, *word.parts[1:]) if part != ""), word.line)]
        elif name is not None and word.text[ends : ends + 1].isspace() and not _takes(flag, values, table):
            message = (
                f"line {word.line}: {masked_command(word.text)[:80]!r} is one word, so no option of that name is given"
            )
            source = "POSIX Shell Command Language 2.2: quotes keep blanks within a word"
            options.findings.append(Finding("flag-quoted", "error", message, "take the quotes off", source))
        elif isinstance(first, Unknown) and first.several and len(word.parts) == 1 and not _takes(flag, values, table):
            options.opaque.append(first)
        elif flag is not None:
            values.append(word)
        else:
            options.positional.append(word)
    if flag is not None:
        yield Option(flag, tuple(values), line)


def _takes(flag: str | None, values: Sequence[Value], table: Mapping[str, Row]) -> bool:
    """Whether a word of unknown content is more likely the flag's value than further options."""
    if flag is None or values:
        return False
    row = table.get(flag)
    return row is None or row.convert is not None


def _add(options: Options, option: Option, table: Mapping[str, Row], project: str, *, added: bool = False) -> None:
    row = table.get(option.flag)
    if row is None and option.flag.startswith("-") and option.flag not in known_flags(project):
        whole = abbreviated(option.flag, project)
        if whole is not None:
            option = Option(whole, option.values, option.line)
            row = table.get(whole)
    _twice(options, option)
    options.by_flag[option.flag] = option
    if row is None:
        if not _known(option.flag, project, added):
            options.findings.append(_unknown_flag(option, project))
        else:
            options.unread.append(option.flag)
        return
    options.settings.pop(row.target, None)
    options.origins[row.target] = option
    for flag in [flag for flag in options.unsettled if table[flag].target == row.target]:
        del options.unsettled[flag]  # the last one counts
    if row.convert is None:
        options.settings[row.target] = row.present
        return
    value = option.values[0] if option.values else None
    if len(option.values) > 1:
        value = (
            Value((" ".join(v.text for v in option.values),), option.line) if not _open(option) else option.values[0]
        )
    if value is None:
        message = f"line {option.line}: {option.flag} has no value"
        options.findings.append(Finding("flag-value", "error", message, source=row.source))
    elif value.known is None:
        options.unsettled[option.flag] = option
    else:
        try:
            options.settings[row.target] = row.convert(value.known)
        except NotRead as error:
            options.settings.pop(row.target, None)
            message = f"line {option.line}: {option.flag}: {error}"
            options.findings.append(Finding("flag-not-read", "warning", message, source=row.source))
        except ValueError as error:
            message = f"line {option.line}: {option.flag} {value.known[:80]}: {error}"
            options.findings.append(Finding("flag-value", "error", message, source=row.source))


def _open(option: Option) -> bool:
    return any(value.unknowns for value in option.values)


def _twice(options: Options, option: Option) -> None:
    """An option that is given twice with different values: the last one counts."""
    earlier = options.by_flag.get(option.flag)
    if earlier is None or option.line == 0 or earlier.values_text == option.values_text:
        return
    message = (
        f"line {earlier.line}: {earlier.text} is overridden on line {option.line} by {option.text}: the last one counts"
    )
    repair = f"keep one of them: drop line {earlier.line}'s"
    options.findings.append(
        Finding("flag-twice", "warning", message, repair, "argparse: store actions; hydra: overrides")
    )


def _known(flag: str, project: str, added: bool) -> bool:
    if project == "verl":
        parents = ("override_transformer_config", "override_ddp_config", "override_optimizer_config", "engine_kwargs")
        return added or flag in known_flags("verl") or any(f".{parent}." in flag for parent in parents)
    known = known_flags(project)
    head = flag.partition(".")[0]  # vLLM: --compilation-config.level 3
    if flag in known or head in known or f"--{flag.removeprefix('--no-')}" in known:
        return True
    return not flag.startswith("--") and len(flag) <= 2


def _unknown_flag(option: Option, project: str) -> Finding:
    near = nearest_flag(option.flag, project)
    message = f"line {option.line}: {option.flag} is not among the options of {project} that are known here"
    source = "catalog/launch_flags.toml: versions differ, and a script may add options of its own"
    return Finding("flag-unknown", "note", message, f"did you mean {near}?" if near else "", source)
