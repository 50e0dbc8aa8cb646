"""Expected tensors against those that the headers state: missing, left over, of another shape or dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.checkpoint.errors import Problem, shown
from lockstep.checkpoint.expected.quantised import FP4_BLOCK, Scheme, Stored, stored
from lockstep.checkpoint.expected.rows import Expected
from lockstep.checkpoint.records import TensorEntry

_TIED = {"lm_head.weight": "model.embed_tokens.weight", "head.weight": "embed.weight"}
_NO_WEIGHTS = (".rotary_emb.inv_freq",)
"""Tables that early Llama checkpoints hold and no loader reads."""
_PARTS = {"mtp": "layers for speculative decoding (MTP)", "towers": "towers for pictures and sound"}


@dataclass(frozen=True, slots=True)
class Compared:
    """The outcome. ``stored`` are the tensors that must be there, absent parts left out; ``twins`` are heads that are
    stored beside the embedding that they are: their values must be equal."""

    problems: list[Problem]
    notes: list[str]
    stored: dict[str, Stored]
    twins: dict[str, str]


def compare(expected: Mapping[str, Expected], scheme: Scheme, tensors: Mapping[str, TensorEntry]) -> Compared:
    """Hold the headers' tensors against the expected ones, in both directions."""
    problems: list[Problem] = []
    wanted = {item.name: item for tensor in expected.values() for item in stored(scheme, tensor)}
    problems += [
        Problem("config.json is refused", f"{shown(name)} has {tensor.shape[-1]} columns, no multiple of {FP4_BLOCK}")
        for name, tensor in expected.items()
        if scheme.form(tensor) == "fp4" and tensor.shape is not None and tensor.shape[-1] % FP4_BLOCK
    ]
    notes = _drop_absent_parts(wanted, tensors)
    for name, item in wanted.items():
        problem = _missing(item) if name not in tensors else _wrong(item, tensors[name])
        if problem is not None:
            problems.append(problem)
    unknown = [name for name in tensors if name not in wanted]
    tables = [name for name in unknown if name.endswith(_NO_WEIGHTS)]
    twins = {name: _TIED[name] for name in unknown if _is_twin(name, wanted, tensors)}
    notes += [f"{len(tables)} tables that no loader reads, such as {shown(tables[0])}"] if tables else []
    problems += [_left_over(tensors[name], scheme, expected) for name in unknown if name not in {*tables, *twins}]
    return Compared(problems, notes, wanted, twins)


def _is_twin(name: str, wanted: Mapping[str, Stored], tensors: Mapping[str, TensorEntry]) -> bool:
    """Whether this is a tied head of its own that may be the embedding again: Qwen3-0.6B is published so."""
    other = tensors.get(_TIED.get(name, ""))
    head = tensors[name]
    return other is not None and other.name in wanted and (head.dtype, head.shape) == (other.dtype, other.shape)


def _drop_absent_parts(wanted: dict[str, Stored], tensors: Mapping[str, TensorEntry]) -> list[str]:
    """MTP layers and towers may be absent, but only as a whole: then they are a note."""
    notes: list[str] = []
    for part, what in _PARTS.items():
        own = [name for name, item in wanted.items() if item.part == part]
        if own and not any(name in tensors for name in own):
            notes.append(f"config.json has {what}, the folder has none of their {len(own)} tensors")
            for name in own:
                del wanted[name]
    return notes


def _missing(item: Stored) -> Problem:
    what = f"{shown(item.name)}: {_described(item)}"
    if item.scale_of:
        return Problem("missing scales", f"{what} is expected beside {shown(item.scale_of)}")
    return Problem("missing tensor", what)


def _described(item: Stored) -> str:
    shape = "" if item.shape is None else f" {list(item.shape)}"
    return f"{' or '.join(item.dtypes)}{shape}"


def _wrong(item: Stored, entry: TensorEntry) -> Problem | None:
    same_shape = item.shape is None or item.shape == entry.shape
    if same_shape and entry.dtype in item.dtypes:
        return None
    kind = "wrong dtype" if same_shape else "wrong shape"
    text = f"{shown(item.name)}: {entry.dtype} {list(entry.shape)}, expected {_described(item)}"
    if same_shape and item.form == "fp8" and not item.scale_of and entry.dtype in ("BF16", "F16", "F32"):
        text += "; a weight that stays unquantised must be in quantization_config.modules_to_not_convert"
    return Problem(kind, text)


def _left_over(entry: TensorEntry, scheme: Scheme, expected: Mapping[str, Expected]) -> Problem:
    name = f"{shown(entry.name)}: {entry.dtype} {list(entry.shape)}"
    for suffix in (".scale", ".weight_scale_inv", "_scale_inv", ".weight_scale"):
        weight = entry.name.removesuffix(suffix) + ".weight"
        if entry.name.endswith(suffix) and weight in expected:
            how = "is unquantised" if scheme.form(expected[weight]) == "plain" else f"has {scheme.scale_suffix[1:]}"
            return Problem("scales without a weight", f"{name}; {shown(weight)} {how} by config.json")
    if entry.name in _TIED:
        return Problem("tensor left over", f"{name}; tie_word_embeddings says that the embedding is the head")
    return Problem("tensor left over", f"{name} is not part of this model")
