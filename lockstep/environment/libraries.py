"""Which of a package's shared libraries hold a name as text: what they do with it can't be seen."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path


def binaries_with(root: Path, names: Sequence[str]) -> dict[str, str]:
    """Names that occur as text in shared libraries below ``root``: name → the library's file name."""
    found: dict[str, str] = {}
    if not names:
        return found
    for folder, _, files in os.walk(root):
        for file in files:
            if re.search(r"\.so(\.\d+)*$", file) and len(found) < len(names):
                found |= _names_in(Path(folder) / file, [name for name in names if name not in found])
    return found


def _names_in(library: Path, names: Sequence[str]) -> dict[str, str]:
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            # Ended by a zero byte: a string of its own, not the beginning of a longer one.
            return {name: library.name for name in names if data.find(name.encode() + b"\0") >= 0}
    except (OSError, ValueError):  # gone, or empty
        return {}
