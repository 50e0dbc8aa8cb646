"""Problems from .jsonl and .parquet files, checked row by row before a run starts.

Data is never code: a row may name a built-in reward or one that the configuration lists, never an import path.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.schema import FileTask
from lockstep.records import Problem
from lockstep.tasks.errors import TaskError
from lockstep.tasks.listed import ListedTask
from lockstep.tasks.rewards import BUILT_IN, RewardSum

ROLES = ("system", "user", "assistant", "tool")
"""Roles of chat messages."""

_MAX_SHOWN = 5
_log = logging.getLogger(__name__)


class _BadRow(ValueError):
    """What is wrong with one row; the reader adds file and line."""


def make_file_task(config: FileTask, rewards: RewardSum) -> ListedTask:
    """The task. Held-out prompts never occur in training, also where the file repeats them.

    Raises TaskError with file and line (jsonl, from 1) or row (parquet, from 0) for each of the first faulty rows.
    """
    problems = read_problems(Path(config.path), config)
    if config.heldout_path is not None:
        heldout = read_problems(Path(config.heldout_path), config)
    else:
        heldout = _hold_out(problems, config)
    held = {_prompt_key(problem) for problem in heldout}
    train = [problem for problem in problems if _prompt_key(problem) not in held]
    if config.heldout_path is not None and len(train) < len(problems):
        _log.warning(
            "%s: left out %d of %d rows whose prompts are also in %s",
            config.path, len(problems) - len(train), len(problems), config.heldout_path,
        )  # fmt: skip
    if not train:
        raise TaskError(f"{config.path}: every prompt is held out; nothing is left to train on")
    return ListedTask(f"file/{Path(config.path).name}", train, heldout, rewards, config.seed)


def _prompt_key(problem: Problem) -> str:
    return json.dumps(problem.prompt, sort_keys=True, default=str)


def _hold_out(problems: list[Problem], config: FileTask) -> list[Problem]:
    """``num_heldout`` rows with different prompts, drawn by seed."""
    chosen: dict[str, Problem] = {}
    for i in np.random.default_rng([config.seed, 0xF17E]).permutation(len(problems)):
        chosen.setdefault(_prompt_key(problems[i]), problems[i])
    if len(chosen) <= config.num_heldout:
        raise TaskError(
            f"{config.path} has {len(chosen)} different prompts: too few to hold out {config.num_heldout} and train on "
            "the rest; lower task.num_heldout or set task.heldout_path"
        )
    return list(chosen.values())[: config.num_heldout]


def read_problems(path: Path, config: FileTask) -> list[Problem]:
    """All problems of a file. Raises TaskError listing the first faulty rows."""
    if not path.is_file():
        raise TaskError(f"{path}: no such file")
    if path.suffix not in (".jsonl", ".parquet"):
        raise TaskError(f"{path}: neither .jsonl nor .parquet")
    problems, faults = [], []
    rows = _parquet_rows(path, config) if path.suffix == ".parquet" else _jsonl_rows(path)
    for where, row in rows:
        try:
            if isinstance(row, _BadRow):
                raise row
            problems.append(_problem(f"{path.name}/{where.replace(' ', '-')}", row, config))
        except _BadRow as fault:
            faults.append(f"{path}, {where}: {fault}")
    if faults:
        more = f"\n… and {len(faults) - _MAX_SHOWN} more" if len(faults) > _MAX_SHOWN else ""
        raise TaskError("\n".join(faults[:_MAX_SHOWN]) + more)
    if not problems:
        raise TaskError(f"{path} holds no rows")
    if config.task_key is not None and all(config.task_key not in problem.row for problem in problems):
        raise TaskError(f"{path}: {_missing_columns(problems[0].row, config.task_key)}")
    return problems


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | _BadRow]]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"), object_pairs_hook=_without_repeats)
            except _BadRow as fault:
                yield f"line {number}", fault
                continue
            except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or a number of too many digits
                yield f"line {number}", _BadRow(f"not JSON: {error}")
                continue
            if not isinstance(row, dict):
                row = _BadRow(f"a JSON object is needed, not {type(row).__name__}")
            yield f"line {number}", row


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys differ. Of two, Python's reader would silently take the last."""
    _check_repeats([key for key, _ in pairs])
    return dict(pairs)


def _check_repeats(keys: list[str]) -> None:
    if repeated := sorted(key for key, count in Counter(keys).items() if count > 1):
        raise _BadRow(f"{repeated} more than once; each key must be there once")


def _parquet_rows(path: Path, config: FileTask) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows as plain dicts, lists, strings and numbers: to_pylist makes no arrays, which chat templates choke on."""
    import pyarrow
    import pyarrow.parquet

    try:
        parquet = pyarrow.parquet.ParquetFile(path)
        _check_repeats(parquet.schema_arrow.names)
        missing = _missing_columns(parquet.schema_arrow.names, config.prompt_key, config.answer_key, config.task_key)
        if missing:
            raise TaskError(f"{path}: {missing}")
        number = 0
        for batch in parquet.iter_batches():
            for row in batch.to_pylist():
                yield f"row {number}", row
                number += 1
    except _BadRow as fault:
        raise TaskError(f"{path}: column(s) {fault}") from fault
    except (pyarrow.ArrowException, OSError) as error:
        raise TaskError(f"{path} can't be read as parquet: {error}") from error


def _missing_columns(present: Iterable[str], *needed: str | None) -> str | None:
    missing = [key for key in needed if key is not None and key not in present]
    return f"column(s) {missing} missing; present: {sorted(present)}" if missing else None


def _problem(problem_id: str, row: dict[str, Any], config: FileTask) -> Problem:
    if missing := _missing_columns(row, config.prompt_key, config.answer_key):
        raise _BadRow(missing)
    answer = None
    if config.answer_key is not None:
        answer = _answer(row[config.answer_key], config.answer_key)
    if config.task_key is not None:
        _check_task(row.get(config.task_key), config)
    return Problem(problem_id, _prompt(row[config.prompt_key], config.prompt_key), answer, row)


def _answer(value: object, key: str) -> str:
    """The reference answer as a text. Numbers are written out as people write them: a column of integers with one gap
    is one of floats in many tools, and 3.0 there means 3; 1e-07 is 0.0000001."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _BadRow(f"{key!r} must be a text or a number, not {_brief(value)}")
    if isinstance(value, str):
        return _text(value, key)
    if not math.isfinite(value):
        raise _BadRow(f"{key!r} must be a finite number, not {value}; leave the row out")
    if isinstance(value, int):
        return str(value)
    return format(Decimal(repr(value)), "f").removesuffix(".0") if value else "0"


def _check_task(name: object, config: FileTask) -> None:
    allowed = sorted({*BUILT_IN, *(reward.name for reward in config.rewards)})
    if name is not None and name not in allowed:
        raise _BadRow(f"{config.task_key!r} must be null or one of {allowed}, not {_brief(name)}")


def _prompt(value: object, key: str) -> str | tuple[dict[str, object], ...]:
    if isinstance(value, str):
        return _text(value, key)
    if not isinstance(value, list) or not value:
        raise _BadRow(f"{key!r} must be a text or a list of chat messages, not {_brief(value)}")
    messages = tuple(_message(message, f"{key}[{i}]", i) for i, message in enumerate(value))
    if messages[-1]["role"] not in ("user", "tool"):
        raise _BadRow(f"{key!r} must end with a message of the user or a tool, not {messages[-1]['role']!r}")
    return messages


def _message(message: object, where: str, index: int) -> dict[str, object]:
    if not isinstance(message, dict):
        raise _BadRow(f"{where} must be an object with role and content, not {_brief(message)}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise _BadRow(f"{where}: role must be one of {list(ROLES)}, not {_brief(role)}")
    if role == "system" and index > 0:
        raise _BadRow(f"{where}: a system message must come first")
    if not isinstance(content, str):
        raise _BadRow(f"{where}: content must be a text, not {_brief(content)}")
    if role == "user" and not content.strip():
        raise _BadRow(f"{where}: content of the user is blank: {content!r}")
    _refuse_half_characters(content, f"{where}: content")
    # Parquet gives every message all keys of the column's type; the absent ones are None.
    return {name: value for name, value in message.items() if value is not None}


def _text(value: str, key: str) -> str:
    if not value.strip():
        raise _BadRow(f"{key!r} is blank: {value!r}")
    _refuse_half_characters(value, repr(key))
    return value


def _refuse_half_characters(text: str, what: str) -> None:
    """JSON can hold half of a surrogate pair, which is no character: no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise _BadRow(f"{what} holds half a surrogate pair, {half}, at character {error.start}: no text") from error


def _brief(value: object) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 80 else text[:77] + "…"
