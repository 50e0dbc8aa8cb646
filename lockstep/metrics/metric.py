"""The law of metric names, and how numbers that JSON can't hold are written.

**Names** are lower-case words joined by ``_`` and grouped by ``/``: ``reward/mean``, ``agreement/abs_diff/p99``. A
quantity with a unit carries it as its suffix: ``_s``, ``_bytes``, ``_tokens``, ``_tokens_per_s``, ``_bytes_per_s``;
shares, log-probs and plain counts carry none. A row is flat: one object per step, with ``step``, ``version`` and
``time`` beside the metrics.

**Values** are finite numbers, text, or absent. A metric that could not be computed is left out of the row; it is never
written as 0. A number that *was* computed and is not finite is a finding, so it is kept: JSON has no NaN, hence it is
written as the text ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``, and the reader turns exactly these three texts back
into floats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

Scalar = int | float | str | bool

NONFINITE_TEXTS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""The three texts that stand for numbers in JSON written by Lockstep."""

_NAME = re.compile(r"[a-z][a-z0-9_]*(/[a-z0-9][a-z0-9_]*)*")

_UNITS = (
    ("_tokens_per_s", "tokens/s"),
    ("_bytes_per_s", "bytes/s"),
    ("_bytes", "bytes"),
    ("_tokens", "tokens"),
    ("_s", "s"),
)


def check_name(name: str) -> str:
    """The name itself if it obeys the law; ValueError with the law otherwise."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"metric name {name!r}: names are lower-case words joined by '_' and grouped by '/', "
            "for example 'time/rollout_s'"
        )
    return name


def unit_of(name: str) -> str | None:
    """Unit that a name declares by its suffix: ``"s"``, ``"bytes"``, ``"tokens"``, a rate of these two, or None."""
    return next((unit for suffix, unit in _UNITS if name.endswith(suffix)), None)


def check_row(row: Mapping[str, object]) -> dict[str, Scalar]:
    """The row with numpy scalars as Python numbers. ValueError names a key that breaks the law of names or values."""
    checked: dict[str, Scalar] = {}
    for name, value in row.items():
        check_name(name)
        plain = value.item() if isinstance(value, np.generic) else value
        if not isinstance(plain, Scalar):
            hint = "leave out a metric that was not computed" if plain is None else "a number or text is needed"
            raise ValueError(f"metric {name}: {type(value).__name__} is not a metric value; {hint}")
        checked[name] = plain
    return checked


def nonfinite_text(value: float) -> str:
    """The text that stands for NaN or an infinity."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def encode_nonfinite(value: object) -> object:
    """``value`` (nested dicts, lists, scalars) with non-finite floats as text, ready for ``json.dumps``.

    Raises ValueError on text that reads like one of the three, because the reader could not tell it from a number, and
    on a type that JSON has no place for.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return nonfinite_text(value)
    if isinstance(value, str) and value in NONFINITE_TEXTS:
        raise ValueError(f"the text {value!r} is reserved for the number; write the number")
    if value is None or isinstance(value, Scalar):
        return value
    if isinstance(value, Mapping):
        return {_text_key(key): encode_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode_nonfinite(inner) for inner in value]
    raise ValueError(f"{type(value).__name__} can't be written as JSON: {value!r:.80}")


def decode_nonfinite(value: object) -> object:
    """Undo ``encode_nonfinite`` on what ``json.loads`` returned."""
    if isinstance(value, str):
        return NONFINITE_TEXTS.get(value, value)
    if isinstance(value, dict):
        return {key: decode_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [decode_nonfinite(inner) for inner in value]
    return value


def _text_key(key: object) -> str:
    if not isinstance(key, str):
        raise ValueError(f"key {key!r} of an object must be text")
    return key
