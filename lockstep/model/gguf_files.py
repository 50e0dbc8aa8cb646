"""Reading one GGUF file once.

transformers parses a GGUF file anew for the tokenizer, the configuration and the weights, and makes the same table of
tensor names for every submodule: most of the 26 s that loading SmolLM2-135M took on two cores went there. Within
``parsed_once`` both are remembered, which changes no value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import numpy as np


@contextmanager
def parsed_once() -> Iterator[None]:
    """Remember GGUF files by path, and tables of tensor names, until the outermost block ends. The file must not change
    in it."""
    import gguf

    if not isinstance(gguf.GGUFReader, type):  # inside such a block already
        yield
        return

    class PlainReader(gguf.GGUFReader):
        """Its file as a plain array: every one of half a million small slices of a memmap costs a Python call more."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: np.memmap) -> None:
            self._data = np.asarray(mapped)

    with (
        mock.patch.object(gguf, "GGUFReader", cache(PlainReader)),
        mock.patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        yield
