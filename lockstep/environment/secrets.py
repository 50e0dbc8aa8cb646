"""Masking in running text: the values of secrets, wherever a library prints them.

Names decide in tables (``config/secrets.py``); here the values that stand in this process' environment are looked for,
in texts, in command lines and in whatever any logger says.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.config.secrets import MASK, is_secret, masked, masked_table

__all__ = [
    "MASK",
    "is_secret",
    "mask_arguments",
    "mask_text",
    "masked",
    "masked_records",
    "masked_table",
    "secret_values",
]

_SHORTEST = 6
"""Characters: a shorter value is found in innocent text too often to be masked there."""


def secret_values(*environments: Mapping[str, str]) -> tuple[str, ...]:
    """Values of secrets in these environments, longest first, so that one that holds another goes as a whole."""
    found = {
        value
        for environment in environments
        for name, value in environment.items()
        if is_secret(name) and len(value) >= _SHORTEST and value != MASK
    }
    return tuple(sorted(found, key=lambda value: (-len(value), value)))


def mask_text(text: str, values: Iterable[str]) -> str:
    """The text with every secret value replaced."""
    for value in values:
        text = text.replace(value, MASK)
    return text


def mask_arguments(arguments: Sequence[str], values: Iterable[str] = ()) -> list[str]:
    """A command line with the values of secrets replaced: those in ``values``, and what follows ``NAME=`` where the
    name (the last part of a dotted key) is a secret's."""
    values = tuple(values)
    shown: list[str] = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        name = key.rsplit(".", 1)[-1].strip(" '\"")
        hidden = f"{key}={MASK}" if equals and value and is_secret(name) else argument
        shown.append(mask_text(hidden, values))
    return shown


@contextmanager
def masked_records(values: Iterable[str]) -> Iterator[None]:
    """Mask secret values in every log record that is made meanwhile, message, traceback and stack included. Records are
    changed where they are made: handlers of other loggers (transformers and vLLM have their own) see them so too."""
    values, before = tuple(values), logging.getLogRecordFactory()
    if not values:
        yield
        return

    def make(*arguments: Any, **named: Any) -> logging.LogRecord:
        return _mask_record(before(*arguments, **named), values)

    logging.setLogRecordFactory(make)
    try:
        yield
    finally:
        if logging.getLogRecordFactory() is make:  # what somebody else has set since stays, and goes on to this one
            logging.setLogRecordFactory(before)


def _mask_record(record: logging.LogRecord, values: Sequence[str]) -> logging.LogRecord:
    try:
        text = record.getMessage()
    except Exception:  # arguments that do not fit: logging would report that with all of them, unmasked
        text = f"{record.msg} {record.args}"
        record.msg, record.args = mask_text(text, values), ()
    if any(value in text for value in values):
        record.msg, record.args = mask_text(text, values), ()
    if record.exc_info and record.exc_info[0] is not None:
        trace = logging.Formatter().formatException(record.exc_info)
        if any(value in trace for value in values):
            # Text in place of the exception: a handler that formats it itself would show the secret.
            record.exc_text, record.exc_info = mask_text(trace, values), None
    if record.stack_info:
        record.stack_info = mask_text(record.stack_info, values)
    return record
