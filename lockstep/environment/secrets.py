"""Masking in running text: the values of secrets, wherever a library prints them.

Names decide in tables (``config/secrets.py``); here the values that stand in this process' environment are looked for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from lockstep.config.secrets import MASK, is_secret, masked, masked_table

__all__ = [
    "MASK",
    "SecretFilter",
    "is_secret",
    "mask_arguments",
    "mask_text",
    "masked",
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


class SecretFilter(logging.Filter):
    """Masks secret values in every record that passes a handler, arguments and exception text included."""

    def __init__(self, values: Iterable[str]) -> None:
        super().__init__()
        self._values = tuple(values)

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrites the record; always lets it pass."""
        if self._values:
            record.msg, record.args = mask_text(record.getMessage(), self._values), ()
            if record.exc_info and not record.exc_text:
                record.exc_text = logging.Formatter().formatException(record.exc_info)
            if record.exc_text:
                record.exc_text = mask_text(record.exc_text, self._values)
        return True
