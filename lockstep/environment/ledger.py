"""The ledger: for each process and variable what is declared, what the shell has, what is in force, and who reads it.

::

    declared (configuration) ──┐                              ┌── rows       environment.json
    inherited (the shell) ─────┼──► judge ◀── catalogue ──────┤
    installed packages ────────┘        ◀── readers.ask       └── findings   warnings, errors where strict

A variable is a fault where nobody reads it, where the installed version does not know it, where its value is none that
the reader takes, or where another one contradicts it. Equal to the default: a note. What can't be decided is *unknown*
and no fault. Pure but for the scan of packages, which are never imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from lockstep.config.secrets import masked
from lockstep.environment.catalogue import (
    ALSO_READ_BY,
    BINARIES,
    Condition,
    Variable,
    family_variables,
    is_binary,
    normal,
    reader_of,
    variables,
)
from lockstep.environment.reachability import Platform
from lockstep.environment.readers import Answer, Package, Read, ask, installed_package, other_build

Severity = Literal["error", "warning", "note"]
Packages = Mapping[str, Package] | Callable[[str], Package | None]


@dataclass(frozen=True, slots=True)
class LedgerFinding:
    """What is wrong with a variable. ``rule`` is "variable-unread", "variable-value", "variable-contradicted",
    "variable-process", "variable-default", "variable-stray" or "variable-unknown"; ``repair`` the way out."""

    rule: str
    severity: Severity
    process: str
    name: str
    message: str
    repair: str = ""
    source: str = ""

    def text(self) -> str:
        """Lines for a terminal."""
        lines = [f"{self.severity}: {self.rule}: {self.process}: {self.message}"]
        if self.repair:
            lines.append(f"    repair: {self.repair}")
        if self.source:
            lines.append(f"    source: {self.source}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Row:
    """One variable in one process. None: not declared, not in the shell, not set. Secrets are masked already.
    ``read_at_run_time`` is filled in after the process has run (None: nobody looked)."""

    process: str
    name: str
    declared: str | None
    inherited: str | None
    effective: str | None
    read: Read
    reason: str
    places: tuple[str, ...] = ()
    read_at_run_time: bool | None = None


@dataclass(frozen=True, slots=True)
class Ledger:
    """All rows and findings of a launch."""

    rows: tuple[Row, ...]
    findings: tuple[LedgerFinding, ...]

    @property
    def errors(self) -> tuple[LedgerFinding, ...]:
        """Findings that refuse the launch."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def as_dict(self) -> dict[str, Any]:
        """For ``environment.json``."""
        return {"rows": [asdict(row) for row in self.rows], "findings": [asdict(finding) for finding in self.findings]}


def judge(
    declared: Mapping[str, Mapping[str, str]],
    inherited: Mapping[str, str],
    *,
    packages: Packages | None = None,
    strict: bool = False,
    platform: Platform | None = None,
) -> Ledger:
    """The ledger of a launch.

    ``declared`` is what the configuration sets, by process ("trainer", "engine"); ``inherited`` the shell's
    environment. ``packages`` are the readers to look into (by import name, or a function from it; None: those
    installed here); ``platform`` the device that the run is for, by which code counts as reachable (None: any).
    ``strict`` makes faults of declared variables errors.
    """
    find = _finder(packages)
    strays = family_variables(inherited)
    asked = {name for table in declared.values() for name in table} | set(strays)
    asked |= {c.name for name in asked if (known := variables().get(name)) for c in (*known.requires, *known.excludes)}
    answers = _answers(sorted(asked), find, platform)
    rows: list[Row] = []
    findings: list[LedgerFinding] = []
    for process, table in declared.items():
        process_of = _Process(process, table, inherited, answers, strict, platform)
        for name in [*table, *(name for name in strays if name not in table)]:
            rows.append(process_of.row(name))
            findings += process_of.judge(name) if name in table else ()
        findings += process_of.contradictions()
    findings += _stray_findings(strays, declared, inherited, answers)
    order = {"error": 0, "warning": 1, "note": 2}
    return Ledger(tuple(rows), tuple(sorted(findings, key=lambda finding: order[finding.severity])))


def _finder(packages: Packages | None) -> Callable[[str], Package | None]:
    if packages is None:
        return installed_package
    return packages if callable(packages) else packages.get


def _answers(
    names: Sequence[str], find: Callable[[str], Package | None], platform: Platform | None
) -> dict[str, Answer]:
    """Whether each name is read, by the package that it belongs to; one scan of each package for all its names."""
    answers: dict[str, Answer] = {}
    by_reader: dict[str, list[str]] = {}
    for name in names:
        reader = reader_of(name)
        if reader is None:
            answers[name] = Answer("unknown", "no package is known to read it")
        elif reader in BINARIES or is_binary(name):
            answers[name] = Answer("unknown", f"binary: libraries of {reader} read it, which no scan of source sees")
        else:
            by_reader.setdefault(reader, []).append(name)
    for reader, theirs in by_reader.items():
        package = find(reader)
        if package is None:
            for name in theirs:
                released = f"; as released: {text}" if (text := _released(name)) else ""
                answers[name] = Answer("unknown", f"{reader} is not installed here{released}")
            continue
        answers |= ask(package, theirs, platform)
        if unread := [name for name in theirs if answers[name].read == "not read"]:
            answers |= _elsewhere(package, unread, find, platform)
    return answers


def _elsewhere(
    package: Package, unread: Sequence[str], find: Callable[[str], Package | None], platform: Platform | None
) -> dict[str, Answer]:
    """Answers that replace "not read": of packages that read the family's names too, or that this build can't tell."""
    if other_build(package, platform):
        reason = f"{package.title} does not know it, and the run's torch is another build, for {platform}"
        return {name: Answer("unknown", reason) for name in unread}
    found: dict[str, Answer] = {}
    for one in filter(None, map(find, ALSO_READ_BY.get(package.name, ()))):
        found |= {name: answer for name, answer in ask(one, unread, platform).items() if answer.read != "not read"}
    return found


def _released(name: str) -> str:
    known = variables().get(name)
    if known is None or not known.released:
        return ""
    return "no version looked at reads it" if known.released == "nowhere" else f"read by {known.released}"


class _Process:
    """One process' variables and what is wrong with them."""

    def __init__(
        self,
        process: str,
        declared: Mapping[str, str],
        inherited: Mapping[str, str],
        answers: Mapping[str, Answer],
        strict: bool,
        platform: Platform | None,
    ) -> None:
        self._process, self._declared, self._inherited = process, declared, inherited
        self._answers, self._platform = answers, platform
        self._fault: Severity = "error" if strict else "warning"

    def effective(self, name: str) -> str | None:
        """The value in force: the declared one, else the shell's."""
        return self._declared.get(name, self._inherited.get(name))

    def row(self, name: str) -> Row:
        """The variable's row, with secrets masked."""
        answer = self._answers[name]
        declared, inherited, effective = (
            None if value is None else masked(name, value)
            for value in (self._declared.get(name), self._inherited.get(name), self.effective(name))
        )
        return Row(self._process, name, declared, inherited, effective, answer.read, answer.reason, answer.places)

    def judge(self, name: str) -> list[LedgerFinding]:
        """Faults of one declared variable by itself."""
        answer, known = self._answers[name], variables().get(name)
        value = self._declared[name]
        found: list[LedgerFinding] = []
        if answer.read == "not read":
            near = f"; did you mean {' or '.join(answer.near)}?" if answer.near else ""
            places = f" ({', '.join(answer.places)})" if answer.places else ""
            message = f"{_shown(name, value)} has no effect: {answer.reason}{places}{near}"
            found.append(self._found("variable-unread", message, name, "remove it", _history(known)))
        elif reader_of(name) is None and self._process:
            message = f"{_shown(name, value)}: no package is known to read it"
            found.append(self._found("variable-unknown", message, name, severity="note"))
        other = self._inherited.get(name)
        if other is not None and other != value and not (known and known.same(other, value)):
            message = f"{_shown(name, value)} replaces the shell's {_shown(name, other)}"
            found.append(self._found("variable-stray", message, name, severity="note"))
        return found + (self._catalogued(known, name, value) if known is not None else [])

    def _catalogued(self, known: Variable, name: str, value: str) -> list[LedgerFinding]:
        """What the catalogue says of a value."""
        found: list[LedgerFinding] = []
        if refusal := known.refusal(value):
            found.append(self._found("variable-value", f"{name}: {refusal}", name, source=known.source))
        if self._process not in known.processes:
            message = f"{name} is for the {' and the '.join(known.processes)} only"
            way_out = f"move it to environment.{known.processes[0]}"
            found.append(self._found("variable-process", message, name, way_out, known.source))
        default = _source_default(self._answers[name]) or known.default
        if default is not None and known.same(default, value) and self._answers[name].read != "not read":
            message = f"{_shown(name, value)} is the default"
            found.append(self._found("variable-default", message, name, severity="note"))
        elsewhere = self._platform is not None and known.platforms and self._platform not in known.platforms
        if elsewhere and self._answers[name].read != "not read":
            message = f"{name} means something on {' and '.join(known.platforms)} only, this is {self._platform}"
            found.append(self._found("variable-unread", message, name, "remove it", known.source))
        return found

    def contradictions(self) -> list[LedgerFinding]:
        """Variables in force, declared or the shell's, that need or exclude a value of another one."""
        found: list[LedgerFinding] = []
        for name in sorted({*self._declared, *self._inherited} & variables().keys()):
            known, value = variables()[name], self.effective(name)
            if value is None or (name not in self._declared and self._answers[name].read == "not read"):
                continue
            needed = [one for one in known.requires if known.same(one.when, value) and not self._met(one)]
            excluded = [one for one in known.excludes if known.same(one.when, value) and self._has(one)]
            found += [self._contradiction(name, value, one, "needs") for one in needed]
            found += [self._contradiction(name, value, one, "excludes") for one in excluded]
        return found

    def _met(self, condition: Condition) -> bool:
        """Whether what is required is there, or needn't be since nobody reads it any more. It has to be stated: its
        default differs between versions and platforms."""
        read = self._answers[condition.name].read
        if condition.while_read and read == "not read":
            return True
        if condition.while_read and read == "unknown" and self.effective(condition.name) is None:
            return True  # whether the switch is still there can't be told
        return self._has(condition)

    def _has(self, condition: Condition) -> bool:
        value, other = self.effective(condition.name), variables().get(condition.name)
        kind = other.type if other else "text"
        return value is not None and normal(kind, value) == normal(kind, condition.value)

    def _contradiction(self, name: str, value: str, condition: Condition, verb: str) -> LedgerFinding:
        there = self.effective(condition.name)
        state = "it is not set" if there is None else f"it is {masked(condition.name, there)!r}"
        wanted = f"{condition.name}={condition.value}"
        tail = f", and {state}" if verb == "needs" else ", which is set"
        message = f"{_shown(name, value)} {verb} {wanted}{tail}: {condition.reason}"
        way_out = f"set {wanted}" if verb == "needs" else f"change {name} or {condition.name}"
        return self._found("variable-contradicted", message, name, way_out)

    def _found(
        self, rule: str, message: str, name: str, repair: str = "", source: str = "", severity: Severity | None = None
    ) -> LedgerFinding:
        return LedgerFinding(rule, severity or self._fault, self._process, name, message, repair, source)


def with_reads(ledger: Ledger, reads: Mapping[str, Mapping[str, Sequence[str]]]) -> Ledger:
    """The ledger with what processes have looked up: process → name → packages. A process that is not in ``reads``
    was not watched."""
    rows = tuple(
        replace(row, read_at_run_time=row.name in reads[row.process]) if row.process in reads else row
        for row in ledger.rows
    )
    return Ledger(rows, ledger.findings)


def _stray_findings(
    strays: Sequence[str],
    declared: Mapping[str, Mapping[str, str]],
    inherited: Mapping[str, str],
    answers: Mapping[str, Answer],
) -> list[LedgerFinding]:
    """Engine and trainer variables that a user's shell has and no process declares: once each, never an error."""
    found: list[LedgerFinding] = []
    for name in strays:
        if any(name in table for table in declared.values()):
            continue
        answer = answers[name]
        effect = {"read": "it takes effect", "not read": "it has no effect", "unknown": "it may take effect"}[
            answer.read
        ]
        where = "comes from the shell, not from the configuration"
        message = f"{_shown(name, inherited[name])} {where}: {effect} ({answer.reason})"
        way_out = "unset it, or declare it under environment, so that the run is the same elsewhere"
        found.append(LedgerFinding("variable-stray", "warning", "shell", name, message, way_out))
    return found


def _source_default(answer: Answer) -> str | None:
    """The default in the reader's source, if it is a plain constant."""
    text = answer.default.strip("'\"")
    return text if text and not any(sign in text for sign in "()[]{} ") and text != "None" else None


def _shown(name: str, value: str) -> str:
    return f"{name}={masked(name, value)!r}" if any(c.isspace() for c in value) else f"{name}={masked(name, value)}"


def _history(known: Variable | None) -> str:
    if known is None:
        return ""
    released = f"{known.reader} as released: {_released(known.name)}" if known.released else ""
    return "; ".join(part for part in (released, *known.history[-1:]) if part)
