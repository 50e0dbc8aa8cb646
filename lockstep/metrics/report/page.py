"""Puts the data, the style and the script into one HTML file, so that no text in the data can become markup.

Three walls: the data is JSON in which ``<``, ``>`` and ``&`` are escaped, so it can't close its element; the script
writes text, never HTML; and the page's Content-Security-Policy runs only the script with this hash and forbids every
fetch, should the first two fail.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping
from importlib.resources import files

from lockstep.metrics.metric import nonfinite_text

_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render_page(title: str, data: Mapping[str, object]) -> str:
    """The whole page. ``data`` is what ``page.js`` reads; floats may be non-finite."""
    style, page = _asset("page.css"), _asset("page.html")
    script = _asset("charts.js") + _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    pieces = {
        "@csp@": policy,
        "@title@": html.escape(_encodable(title)),
        "@style@": style,
        "@data@": escape_json(data),
        "@script@": script,
    }
    return _fill(page, pieces)


def escape_json(data: Mapping[str, object]) -> str:
    """JSON that may stand inside a ``script`` element, whatever texts it holds. Lone surrogates stay escaped."""
    text = _encodable(json.dumps(_encode(data), ensure_ascii=False, allow_nan=False, separators=(",", ":")))
    for sign, escape in _ESCAPES.items():
        text = text.replace(sign, escape)
    return text


def _encode(value: object) -> object:
    """Non-finite floats as text. Any text is allowed: a token may well be "NaN", and the script knows what it reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return nonfinite_text(value)
    if isinstance(value, Mapping):
        return {name: _encode(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(inner) for inner in value]
    return value


def _encodable(text: str) -> str:
    """Lone surrogates, which UTF-8 can't hold, as ``\\udXXX``: in JSON that is the same text."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _asset(name: str) -> str:
    return files("lockstep.metrics.report").joinpath(name).read_text(encoding="utf-8")


def _fill(page: str, pieces: Mapping[str, str]) -> str:
    """Replace each placeholder where the template has it; a placeholder's look-alike inside the data stays as it is."""
    filled: list[str] = []
    rest = page
    while True:
        found = [(rest.find(name), name) for name in pieces if name in rest]
        if not found:
            return "".join([*filled, rest])
        position, name = min(found)
        filled += [rest[:position], pieces[name]]
        rest = rest[position + len(name) :]
