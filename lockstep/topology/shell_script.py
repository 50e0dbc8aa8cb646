"""Follows a launch script without running it: which commands it would start, with which words and environment.

    text → shell_scan → shell_parse → Follower ──► invocations: (words, exported variables, line)
                                         │
               shell_words, shell_tests ─┘          what only a running shell knows stays `Unknown`

A condition that is not known is followed both ways and what both ways agree on is kept; one that rests on a variable
which nothing in the script sets takes it as unset, unless the script would then give up (``exit``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lockstep.topology import shell_builtins
from lockstep.topology.shell_arithmetic import NotKnown, evaluate
from lockstep.topology.shell_parse import parse_script
from lockstep.topology.shell_syntax import (
    Block,
    Calculation,
    Case,
    Chain,
    Command,
    For,
    Function,
    Group,
    If,
    Loop,
    Pipeline,
    ShellError,
    Simple,
    Test,
)
from lockstep.topology.shell_tests import NO, RAN, UNDECIDED, YES, Verdict, judge
from lockstep.topology.shell_values import (
    Overflow,
    State,
    Value,
    join_states,
    text_value,
    unknown_value,
)
from lockstep.topology.shell_words import expand, expand_text

MAX_CALLS = 12
MAX_ROUNDS = 600


@dataclass(frozen=True, slots=True)
class Invocation:
    """A command that the script starts: its words, and the variables that it gets from the script. ``outer``: the words
    before the script that it stands in, ``srun --nodes=4 bash -c``."""

    words: tuple[Value, ...]
    environment: dict[str, Value]
    line: int
    outer: tuple[Value, ...] = ()


@dataclass(slots=True)
class Script:
    """What following a script found. ``missing``: (path, line) of sourced files that are not here; ``detached``:
    (line, text) of lines that begin with a flag, so that the command before them does not get it."""

    invocations: list[Invocation] = field(default_factory=list)
    missing: list[tuple[str, int]] = field(default_factory=list)
    detached: list[tuple[int, str]] = field(default_factory=list)


def follow(
    text: str,
    *,
    given: dict[str, str] | None = None,
    marker: re.Pattern[str] | None = None,
    load: Callable[[str], str | None] | None = None,
    script: str | None = None,
    directory: str | None = None,
) -> Script:
    """Follow a script.

    ``given`` are variables that the user states; ``marker`` matches texts worth reading as a script of their own (the
    argument of ``bash -c`` or ``ssh``); ``load`` returns a sourced file's text by its path, None if it isn't here.
    Raises ``ShellError`` for what is no script or is beyond a bound; never runs anything.
    """
    state = State(given=given or {}, script=script, directory=directory)
    follower = Follower(state, marker, load)
    try:
        follower.block(parse_script(text.replace("\r\n", "\n")))
    except Overflow as error:
        raise ShellError(follower.line, str(error)) from None
    except RecursionError:
        raise ShellError(follower.line, "commands nested too deeply") from None
    return follower.found


Flow = str | None
"""How a block ended: None at its end, else "exit", "return", "break" or "continue"."""


class Follower:
    """Walks the commands of a script with what is known of its variables."""

    def __init__(self, state: State, marker: re.Pattern[str] | None, load: Callable[[str], str | None] | None) -> None:
        self.state = state
        self.marker = marker
        self.load = load
        self.found = Script()
        self.functions: dict[str, Block] = {}
        self.verdict = YES
        self.line = 1
        self.calls = 0
        self.sources = 0
        self.outer: tuple[Value, ...] = ()

    def block(self, block: Block) -> Flow:
        """Follow commands in order; ``verdict`` is then the last one's."""
        for chain in block.chains:
            flow = self.chain(chain)
            if flow is not None:
                return flow
        return None

    def chain(self, chain: Chain) -> Flow:
        flow = self.pipeline(chain.first)
        for operator, pipeline in chain.rest:
            if flow is not None:
                return flow
            wanted, verdict = operator == "&&", self.verdict
            if verdict.value is not None and verdict.value != wanted:
                continue
            if verdict.sure:
                flow = self.pipeline(pipeline)
            else:
                flow = self.choose(
                    Verdict(verdict.value and True, verdict.sure),
                    lambda pipeline=pipeline: self.pipeline(pipeline),
                    lambda: None,
                    pipeline.line,
                )
        return flow

    def pipeline(self, pipeline: Pipeline) -> Flow:
        self.state.tick()
        outer, flow = self.state, None
        for command in pipeline.commands:
            if len(pipeline.commands) > 1:
                self.state = outer.copy()
            flow = self.command(command)
        if len(pipeline.commands) > 1:
            self.state, self.verdict = outer, RAN
            return None
        if pipeline.negated:
            self.verdict = self.verdict.negated()
        return flow

    def choose(self, verdict: Verdict, yes: Callable[[], Flow], no: Callable[[], Flow], line: int) -> Flow:
        """Follow the branch that is taken, or, where that isn't known, what both branches agree on."""
        if verdict.value is not None and verdict.sure and not verdict.command:
            return yes() if verdict.value else no()
        before, started = self.state, len(self.found.invocations)
        if verdict.value is not None and not verdict.command:
            likely, other = (yes, no) if verdict.value else (no, yes)
            self.state = before.copy()
            flow = likely()
            if flow != "exit" or len(self.found.invocations) > started:
                return flow
            self.state = before
            return other()
        ends: list[tuple[Flow, State]] = []
        for branch in (yes, no):
            self.state = before.copy()
            ends.append((branch(), self.state))
        lasting = [(flow, state) for flow, state in ends if flow != "exit"] or ends[-1:]
        self.state = before
        join_states(self.state, [state for _, state in lasting], line)
        self.verdict = UNDECIDED
        return lasting[0][0] if len({flow for flow, _ in lasting}) == 1 else None

    def command(self, command: Command) -> Flow:
        """Follow one command of any kind."""
        self.line = getattr(command, "line", self.line) or self.line
        if isinstance(command, Simple):
            return shell_builtins.simple(self, command)
        if isinstance(command, If):
            return self.clauses(command.clauses, command.line)
        if isinstance(command, For):
            return self.for_each(command)
        if isinstance(command, Loop):
            return self.loop(command)
        if isinstance(command, Case):
            return self.case(command, expand_text(command.word, self.state), 0)
        if isinstance(command, Group):
            return self.group(command)
        if isinstance(command, Function):
            self.functions[command.name] = command.body
            self.verdict = YES
        elif isinstance(command, Test):
            self.verdict = judge([expand_text(word, self.state) for word in command.words], self.state, patterns=True)
        elif isinstance(command, Calculation):
            self.verdict = self.calculation(command.body, command.line)
        return None

    def calculation(self, body: str, line: int) -> Verdict:
        """``((…))``: succeeds unless it is 0."""
        try:
            return YES if evaluate(body, self.state, line) else NO
        except NotKnown as error:
            assumed = error.unknown.assumed if error.unknown else None
            if assumed is None or not error.unknown:
                return UNDECIDED
            trial = self.state.copy()
            trial.variables[error.unknown.variable] = text_value(assumed or "0", line)
            try:
                return Verdict(bool(evaluate(body, trial, line)), sure=False)
            except NotKnown:
                return UNDECIDED

    def clauses(self, clauses: Sequence[tuple[Block | None, Block]], line: int) -> Flow:
        remaining = list(clauses)
        if not remaining:
            self.verdict = YES
            return None
        condition, body = remaining.pop(0)
        if condition is None:
            return self.block(body)
        flow = self.block(condition)
        if flow is not None:
            return flow
        verdict = UNDECIDED if self.verdict.command else self.verdict
        return self.choose(verdict, lambda: self.block(body), lambda: self.clauses(remaining, line), line)

    def case(self, command: Case, subject: Value, arm: int) -> Flow:
        if arm == len(command.arms):
            self.verdict = YES
            return None
        patterns, body = command.arms[arm]
        verdict = NO
        for pattern in patterns:
            terms = [subject, text_value("=="), expand_text(pattern, self.state)]
            found = YES if pattern.plain == "*" else judge(terms, self.state, patterns=True)
            if found.value is not False:
                verdict = found
                break
            verdict = Verdict(False, verdict.sure and found.sure)
        return self.choose(
            verdict, lambda: self.block(body), lambda: self.case(command, subject, arm + 1), command.line
        )

    def for_each(self, command: For) -> Flow:
        words = command.words
        values = (
            list(self.state.positional or ())
            if words is None
            else [value for word in words for value in expand(word, self.state)]
        )
        if any(unknown.several for value in values for unknown in value.unknowns) or len(values) > MAX_ROUNDS:
            reason = f"changes in the loop of line {command.line}"
            self.state.assign(command.name, unknown_value(f"${{{command.name}}}", command.line, "", reason))
            return self.choose(UNDECIDED, lambda: self.once(command.body), lambda: None, command.line)
        for value in values:
            self.state.assign(command.name, value)
            flow = self.block(command.body)
            if flow == "break":
                break
            if flow in ("exit", "return"):
                return flow
        self.verdict = YES
        return None

    def once(self, body: Block) -> Flow:
        """A loop's body, followed once."""
        flow = self.block(body)
        return None if flow in ("break", "continue") else flow

    def loop(self, command: Loop) -> Flow:
        if command.first:
            self.calculation(command.first, command.line)
        for _ in range(MAX_ROUNDS):
            flow = self.block(command.condition)
            if flow is not None:
                return flow
            verdict = self.verdict.negated() if command.until else self.verdict
            if verdict.value is None or verdict.command or not verdict.sure:
                if verdict.value is False and not verdict.command:
                    return None
                return self.choose(UNDECIDED, lambda: self.once(command.body), lambda: None, command.line)
            if not verdict.value:
                break
            before = dict(self.state.variables)
            flow = self.block(command.body)
            if flow == "break":
                break
            if flow in ("exit", "return"):
                return flow
            if command.step:
                self.calculation(command.step, command.line)
            if self.state.variables == before:
                break  # it waits for something outside the script
        self.verdict = YES
        return None

    def group(self, command: Group) -> Flow:
        if not command.subshell:
            return self.block(command.body)
        outer = self.state
        self.state = outer.copy()
        flow = self.block(command.body)
        self.state = outer
        return flow if flow is None else None

    def nested(self, text: str, line: int, *, own_shell: bool, outer: tuple[Value, ...] = ()) -> Flow:
        """A text that is a script of its own; ``own_shell``: it sees exported variables only, and what the words
        before it assign (``outer``: ``A=1 bash -c``, ``docker run -e A=1``)."""
        if self.calls >= MAX_CALLS:
            raise ShellError(line, f"scripts and functions nested deeper than {MAX_CALLS}")
        block = parse_script(text, line)
        state, words = self.state, self.outer
        if own_shell:
            self.state = state.copy()
            self.state.variables = {k: v for k, v in state.variables.items() if k in state.exported}
            self.outer = (*words, *outer)
            self.export(outer)
        self.calls += 1
        flow = self.block(block)
        self.calls -= 1
        if own_shell:
            self.state, self.outer = state, words
            return None
        return flow

    def export(self, words: Sequence[Value]) -> None:
        """Variables of the words ``NAME=value``."""
        for word in words:
            first = word.parts[0] if word.parts else ""
            name = re.match(r"([A-Za-z_]\w*)=", first) if isinstance(first, str) else None
            if name is not None and isinstance(first, str):
                parts = (first[name.end() :], *word.parts[1:])
                self.state.assign(name.group(1), Value(tuple(part for part in parts if part != ""), word.line))
                self.state.exported.add(name.group(1))

    def call(self, name: str, arguments: tuple[Value, ...]) -> Flow:
        """A function of the script."""
        if self.calls >= MAX_CALLS:
            raise ShellError(self.line, f"{name}: functions nested deeper than {MAX_CALLS}")
        outer = self.state.positional
        self.state.positional = arguments
        self.calls += 1
        flow = self.block(self.functions[name])
        self.calls -= 1
        self.state.positional = outer
        return None if flow == "return" else flow
