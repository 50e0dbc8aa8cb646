"""What the parts of ``lockstep prepare`` hand to each other: a folder's tensors by their headers, and a transformation
that says which tensors it will write before it reads one byte of weights.

A stage is a ``Transform``. Who runs it (``prepare.py``) streams: for each group it reads the sources, calls ``make``,
writes the result and forgets both, so that memory stays at about twice the largest group whatever the checkpoint's
size. What a transform promises in ``outputs`` is checked against what ``make`` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as a safetensors header states it. ``dtype`` is safetensors' word ("BF16", "F8_E4M3", "F8_E8M0",
    "I8", …); ``begin`` and ``end`` are byte offsets in ``file`` itself, header included.

    Example: ``TensorEntry("model.norm.weight", "BF16", (4096,), "model-00001-of-00046.safetensors", 1024, 9216)``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """A checkpoint folder that was read without its weights: ``config.json`` and every tensor by name."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor that a transform will write, and the source tensors that it needs. ``dtype`` in safetensors' words.
    ``verbatim``: the bytes of its one source unchanged, perhaps under another name; it is copied without ``make``.

    Example: ``OutputTensor("layers.0.ffn.w1.scale", "F8_E8M0", (16, 32), ("layers.0.ffn.w1.weight",))``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    verbatim: bool = False


@dataclass(frozen=True, slots=True)
class OutputGroup:
    """Tensors that are made together (a weight with its scale, an expert stack) and never apart."""

    tensors: tuple[OutputTensor, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """All source tensors, each once, in order."""
        return tuple(dict.fromkeys(name for tensor in self.tensors for name in tensor.sources))


class Transform(Protocol):
    """One stage of a preparation: pure functions of a source folder, deterministic to the byte."""

    @property
    def name(self) -> str:
        """The stage's name in ``prepare.json`` and on the command line: prune, quantise, dequantise, …"""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything that the result depends on beside the source, as JSON; another value is another result."""
        ...

    def config(self, source: CheckpointIndex) -> dict[str, Any]:
        """The rewritten ``config.json``."""
        ...

    def outputs(self, source: CheckpointIndex) -> Sequence[OutputGroup]:
        """All that will be written, in order. Raises ``CheckpointError`` with every reason for a refusal."""
        ...

    def make(self, group: OutputGroup, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of one group; ``read`` gives a source tensor by name."""
        ...
