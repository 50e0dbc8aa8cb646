"""The catalogue of variables as records: what each is for, who reads it, and what it needs beside it."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

Process = Literal["trainer", "engine"]
Kind = Literal["bool", "int", "float", "text", "list"]

_TRUE, _FALSE = ("1", "true", "yes", "y", "on"), ("0", "false", "no", "n", "off")

FAMILIES: Mapping[str, str] = {
    **dict.fromkeys(("SGLANG_", "SGL_"), "sglang"),
    "VLLM_": "vllm",
    "NVTE_": "transformer_engine",
    "AITER_": "aiter",
    **dict.fromkeys(("NCCL_", "RCCL_"), "nccl"),
    **dict.fromkeys(("PYTORCH_", "TORCH_", "TORCHINDUCTOR_"), "torch"),
    "TRITON_": "triton",
    "CUBLAS_": "cublas",
    "CUDA_": "cuda driver",
    **dict.fromkeys(("HSA_", "HIP_", "ROCR_", "AMD_"), "rocm runtime"),
    "MEGATRON_": "megatron",
    "FLASHINFER_": "flashinfer",
    "DEEPEP_": "deep_ep",
    "MORI_": "mori",
    "HF_DATASETS_": "datasets",
    "HF_": "huggingface_hub",
    "TRANSFORMERS_": "transformers",
    **dict.fromkeys(("OMP_", "KMP_", "GOMP_", "MKL_", "ONEDNN_", "DNNL_"), "cpu libraries"),
}
"""Beginning of a name → the package that such names belong to; the first that fits counts."""

ALSO_READ_BY: Mapping[str, tuple[str, ...]] = {
    "transformers": ("huggingface_hub",),  # TRANSFORMERS_OFFLINE
    "huggingface_hub": ("transformers",),
}
"""Package of a family → others that read names of it: only what none of them reads is read by nobody."""

REPORTED = (
    *("SGLANG_", "SGL_", "VLLM_", "NVTE_", "AITER_", "NCCL_", "RCCL_", "CUBLAS_", "HSA_"),
    *("MEGATRON_", "DEEPEP_", "MORI_"),
)
"""Families that change what a run computes or how: a user's shell that has one is told so."""

BINARIES = frozenset({"nccl", "cublas", "cuda driver", "rocm runtime", "cpu libraries"})
"""Readers that are libraries: no scan of Python source sees what they read."""


@dataclass(frozen=True, slots=True)
class Condition:
    """``name`` must (or must not) be ``value`` where the variable itself is ``when``. ``while_read``: only as long as
    the installed reader still reads ``name``."""

    when: str
    name: str
    value: str
    reason: str
    while_read: bool = False


@dataclass(frozen=True, slots=True)
class Variable:
    """A catalogued variable; the fields are explained at the head of ``catalog/variables.toml``."""

    name: str
    type: Kind
    reader: str
    processes: tuple[Process, ...]
    purpose: str
    default: str | None = None
    choices: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()
    used_by: tuple[str, ...] = ()
    binary: bool = False
    requires: tuple[Condition, ...] = ()
    excludes: tuple[Condition, ...] = ()
    released: str = ""
    history: tuple[str, ...] = ()
    source: str = ""

    def same(self, one: str, other: str) -> bool:
        """Whether two values mean the same to the reader: ``1`` and ``true`` do for a bool, ``010`` and ``10`` for an
        int."""
        return normal(self.type, one) == normal(self.type, other)

    def refusal(self, value: str) -> str | None:
        """Why the reader can't take this value, None if it can."""
        if normal(self.type, value) is None:
            wanted = {"bool": "0 or 1, true or false", "int": "a whole number", "float": "a number"}[self.type]
            return f"{value!r} is no {self.type}: expected {wanted}"
        if self.choices and value not in self.choices:
            return f"{value!r} is none of {', '.join(self.choices)}"
        return None


def normal(kind: Kind, value: str) -> object:
    """A value as its reader sees it; None if it is none of that kind."""
    text = value.strip()
    if kind == "bool":
        return True if text.lower() in _TRUE else False if text.lower() in _FALSE else None
    if kind in ("int", "float"):
        try:
            return int(text) if kind == "int" else float(text)
        except ValueError:
            return None
    if kind == "list":
        return tuple(sorted(part.strip() for part in value.split(",")))
    return value


@functools.cache
def variables() -> Mapping[str, Variable]:
    """The whole catalogue by name."""
    text = resources.files("lockstep.environment").joinpath("catalog", "variables.toml").read_text("utf-8")
    return {name: _variable(name, entry) for name, entry in tomllib.loads(text).items()}


def _variable(name: str, entry: Mapping[str, Any]) -> Variable:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    for key in ("requires", "excludes"):
        fields[key] = tuple(Condition(**condition) for condition in entry.get(key, ()))
    return Variable(name=name, **fields)


def reader_of(name: str) -> str | None:
    """The package that a name belongs to: the catalogue's, else its family's; None if neither knows it."""
    known = variables().get(name)
    if known is not None:
        return known.reader
    return next((package for prefix, package in FAMILIES.items() if name.startswith(prefix)), None)


def is_binary(name: str) -> bool:
    """Whether the variable's reader is a library, or holds libraries that may read it."""
    known = variables().get(name)
    return (known.binary if known is not None else False) or reader_of(name) in BINARIES


def family_variables(environment: Mapping[str, str]) -> list[str]:
    """Names of a shell's environment that are catalogued or of a reported family, in order."""
    return sorted(
        name for name in environment if name in variables() or (name.startswith(REPORTED) and name not in _FROM_IMAGES)
    )


_FROM_IMAGES = frozenset({"NCCL_VERSION"})
"""What container images set for their own records: no setting of a run."""
