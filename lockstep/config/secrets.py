"""What is a secret by its name, and what is shown in its place. Below every layer that prints or writes a setting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "<secret>"
"""Stands for a secret's value in every text and file. As a value of a configuration it means: take the variable from
the shell (a resumed run finds it in its own ``config.toml``)."""

_SECRET = frozenset(
    {
        *("secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials", "authorization"),
        *("cookie", "bearer", "apikey", "auth"),
    }
)
_SECRET_AT_THE_END = frozenset({"token", "key", "pass", "pat", "pwd"})
_COUNTS = frozenset({"max", "min", "num", "per", "count"})


def is_secret(name: str) -> bool:
    """Whether a variable's or setting's name is that of a secret: HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY.

    Words are what underscores separate. ``max_token`` counts tokens and is none; TOKEN, KEY and the like count as the
    last word, or before ID, VALUE, FILE or a number. Too much masked does no harm, too little does.
    """
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    if _SECRET.intersection(words):
        return True
    while len(words) > 1 and re.fullmatch(r"id|value|file|\d+", words[-1]):
        words.pop()
    return len(words) > 1 and words[-1] in _SECRET_AT_THE_END and not _COUNTS.intersection(words)


def masked(name: str, value: str) -> str:
    """The value, or what is shown in its place if the name is a secret's. An empty secret shows that it is empty."""
    return MASK if value and is_secret(name) else value


def shown(path: tuple[str, ...], value: Any) -> Any:
    """The value of a configuration's key as it may be shown: that of a variable is masked by the variable's name."""
    return masked(path[-1], value) if path[:1] == ("environment",) and isinstance(value, str) else value


def shown_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A whole configuration as plain values, the secrets among its variables masked."""
    section = config.get("environment", {})
    tables = {key: masked_table(value) if isinstance(value, Mapping) else value for key, value in section.items()}
    return {**config, "environment": tables}


def masked_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table of variables with its secrets masked."""
    return {name: masked(name, value) if isinstance(value, str) else value for name, value in table.items()}


def masked_tree(value: Any) -> Any:
    """Plain data with the secrets among its tables masked, however deep they lie."""
    if isinstance(value, Mapping):
        return {k: masked(k, v) if isinstance(v, str) else masked_tree(v) for k, v in value.items()}
    return [masked_tree(item) for item in value] if isinstance(value, list | tuple) else value


_COLUMN = re.compile(r"(input|label|metadata|tools?|prompt|image|video|audio|multimodal|reward|reward_fn|mask)[_-]key$")
_FLAG = re.compile(r"(?<!\S)([-+\w.]+)([= ])(\S+)")


def masked_option(flag: str, value: str) -> str:
    """The value of a command's option; ``--input-key`` and its like name a column of a data set and no secret."""
    return value if _COLUMN.search(flag) else masked(flag, value)


def masked_command(text: str) -> str:
    """Words of a command with the values of secret options and variables masked."""
    return _FLAG.sub(lambda found: found[1] + found[2] + masked_option(found[1], found[3]), text)
