"""Small helpers for files and for ``module:function`` of the catalogue."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.lanes.errors import LanesError


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole: beside it, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def load_function(spec: str, root: Path) -> Callable[..., Any]:
    """The function that ``module:function`` of the catalogue names, looked for from the project's root.

    Raises ``LanesError`` if there is none.
    """
    module_name, colon, name = spec.partition(":")
    if not colon:
        raise LanesError(f"{spec}: expected module:function")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise LanesError(f"{spec} of the catalogue can't be imported: {error}") from error
    if not callable(function):
        raise LanesError(f"{spec} of the catalogue: {module_name} has no function {name}")
    return function
