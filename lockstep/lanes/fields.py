"""The arguments of a lane mark: read as literals, checked one by one, all problems at once."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

from lockstep.lanes.declare import Declaration, Disabled

Problems = list[tuple[int, str]]
RUN_KEYS = ("num_steps", "step_s", "checked_at_step")


def build_declaration(mark: ast.Call) -> tuple[Declaration | None, Problems]:
    """The declaration that a call ``pytest.mark.lane(…)`` writes, or None with (line, what is wrong) for each fault."""
    problems: Problems = []
    values = _arguments(mark, problems)
    known = {name: value for name, value in values.items() if name in CHECKS}
    for name in values.keys() - known.keys():
        problems.append((mark.lineno, f"unknown argument {name}; known: {', '.join(CHECKS)}"))
    absent = [name for name in REQUIRED if name not in values]
    failed = {text.split(" ")[0] for _, text in problems}
    problems += [(mark.lineno, f"{name} is missing: {REQUIRED[name]}") for name in absent if name not in failed]
    fields: dict[str, Any] = {}
    for name, (line, value) in known.items():
        try:
            fields[name] = CHECKS[name](value)
        except ValueError as error:
            problems.append((line, f"{name}: {error}"))
    return (None, problems) if problems else (Declaration(**fields), problems)


def _arguments(mark: ast.Call, problems: Problems) -> dict[str, tuple[int, Any]]:
    """(line, value) by argument; the lane is the only positional one."""
    written = [("lane", argument) for argument in mark.args[:1]]
    if len(mark.args) > 1:
        problems.append((mark.lineno, "only the lane is positional; name the other arguments"))
    for keyword in mark.keywords:
        if keyword.arg is None:
            problems.append((mark.lineno, "** hides what is declared; write the arguments out"))
        else:
            written.append((keyword.arg, keyword.value))
    values: dict[str, tuple[int, Any]] = {}
    for name, node in written:
        try:
            values[name] = (node.lineno, literal(node))
        except ValueError as error:
            problems.append((error.args[1], f"{name} {error.args[0]}"))
    return values


def literal(node: ast.expr) -> Any:
    """The value of a literal, in which ``Disabled(…)`` may stand. Raises ``ValueError(text, line)`` for others."""
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise ValueError("is not literal: ** hides what is declared", node.lineno)
        return {_key(key): literal(value) for key, value in zip(node.keys, node.values, strict=True) if key is not None}
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Disabled":
        names = ("reason", "issue", "expires")
        given = dict(zip(names, node.args, strict=False)) | {word.arg or "**": word.value for word in node.keywords}
        if set(given) != set(names) or len(node.args) > len(names):
            raise ValueError("Disabled needs reason, issue and expires, nothing else", node.lineno)
        return Disabled(**{name: literal(value) for name, value in given.items()})
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        text = ast.unparse(node)
        raise ValueError(
            f"is not literal: {text[:60]}; write the value itself, it is read without running the file", node.lineno
        ) from None


def _key(node: ast.expr) -> Any:
    key = literal(node)
    if not isinstance(key, str):
        raise ValueError(f"has a key that is no text: {ast.unparse(node)[:60]}", node.lineno)
    return key


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"expected a text that is not empty, got {value!r}")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a list of texts, got {value!r}")
    return tuple(_text(one) for one in value)


def _minutes(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"expected a number of minutes above 0, got {value!r}")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a whole number from 0, got {value!r}")
    return value


def _mapping(inner: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError(f'expected a table by vendor or hardware, such as {{"rocm": …}}, got {value!r}')
        return {_text(key): inner(one) for key, one in value.items()}

    return check


def _hardware(value: Any) -> dict[str, tuple[str, ...]]:
    models = _mapping(lambda one: (one,) if isinstance(one, str) and one else _texts(one))(value)
    if not models or not all(models.values()):
        raise ValueError('expected at least one model by vendor, such as {"cuda": "h200", "rocm": "mi350"}')
    return models


def _disabled(value: Any) -> Disabled:
    if not isinstance(value, Disabled):
        raise ValueError(f"expected Disabled(reason=…, issue=…, expires=…), got {value!r}")
    for name in ("reason", "issue", "expires"):
        try:
            _text(getattr(value, name))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    try:
        date.fromisoformat(value.expires)
    except ValueError:
        raise ValueError(f"expires must be a date such as 2027-01-31, got {value.expires!r}") from None
    return value


def _environment(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(one, str) for one in value.values()):
        raise ValueError(f"expected texts by variable, got {value!r}")
    return {_text(name): one for name, one in value.items()}


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a table, got {value!r}")
    return {_text(name): one for name, one in value.items()}


def _run(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping) or set(value) - set(RUN_KEYS):
        raise ValueError(f"expected a table of {', '.join(RUN_KEYS)}, got {value!r}")
    return {name: _minutes(number) for name, number in value.items()}


CHECKS: dict[str, Callable[[Any], Any]] = {
    "lane": _text,
    "hardware": _hardware,
    "minutes": _minutes,
    "owner": _text,
    "labels": _texts,
    "disabled": _mapping(_disabled),
    "recipe": _text,
    "overlay": _mapping(_text),
    "layout": _mapping(_table),
    "extra_args": _mapping(_texts),
    "extra_env": _mapping(_environment),
    "gates": _texts,
    "run": _run,
    "retries": _count,
}
"""Each argument of the mark, with the function that gives its value or says what is wrong with it."""

REQUIRED = {
    "lane": 'the first argument, such as "stage-b-1-gpu"',
    "hardware": 'such as {"cuda": "h200"}, or {"cpu": "cpu"}',
    "minutes": "an estimate for all parameters together; the plan and the timeout come from it, and nothing is assumed",
    "owner": "who is asked when it fails",
}
