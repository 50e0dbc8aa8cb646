"""What is known about each architecture of transformers: may sequences be packed, may they be right-padded, what is
never trained. Every row is held by a contract test that compares layouts (log-probs and gradients) on a tiny model.

Right padding needs only causality (no position looks to the right); packing needs that positions mix in masked
attention alone, so that a mask and restarted positions isolate sequences. Whatever is not in the table runs one
sequence at a time, which is right for every causal model.
"""

from __future__ import annotations

import fnmatch
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row. ``frozen`` are patterns (fnmatch) of parameter names that get no gradient in any forward.

    ``plain_attention``: attention is softmax(q kᵀ · scale) v through transformers' interface and nothing else (no
    sinks, no selection of keys), so that another implementation may be put in its place.
    """

    model_type: str
    packs: bool
    right_pads: bool
    note: str
    frozen: tuple[str, ...] = ()
    plain_attention: bool = False


_DENSE = "positions mix in masked attention only"
_INDEXER = "the indexer picks keys by top-k, which has no gradient"

_TABLE = {
    row.model_type: row
    for row in (
        Architecture("llama", True, True, _DENSE, plain_attention=True),
        Architecture("mistral", True, True, _DENSE, plain_attention=True),
        Architecture("qwen2", True, True, _DENSE, plain_attention=True),
        Architecture("qwen3", True, True, _DENSE, plain_attention=True),
        Architecture("qwen3_moe", True, True, _DENSE, plain_attention=True),
        Architecture("glm4_moe", True, True, _DENSE, plain_attention=True),
        Architecture("deepseek_v3", True, True, _DENSE, plain_attention=True),
        Architecture(
            "deepseek_v32", True, True, f"{_DENSE}; the indexer selects within the mask; {_INDEXER}", ("*.indexer.*",)
        ),
        Architecture(
            "glm_moe_dsa", True, True, f"{_DENSE}; the indexer selects within the mask; {_INDEXER}", ("*.indexer.*",)
        ),
        Architecture(
            "deepseek_v4",
            False,
            True,
            f"compressors cut windows by position in the row: never pack, never pad at the left; {_INDEXER}",
            ("*.indexer.*",),
        ),
        Architecture("gpt_oss", False, True, "layers alternate between two masks; a single packed mask would drop one"),
        Architecture("inkling_text", False, True, "short convolutions mix neighbours in the row, whatever the mask"),
    )
}

Packing = Literal["single", "padded", "packed", "shared_prompt"]


def known_architectures() -> tuple[Architecture, ...]:
    """All rows of the table."""
    return tuple(_TABLE.values())


def architecture_of(config: Any) -> Architecture:
    """The row for a transformers configuration; a cautious one (no packing, no padding) if it isn't in the table."""
    row = _TABLE.get(config.model_type)
    if row is None:
        return Architecture(config.model_type, False, False, "not in the table of proved architectures")
    if row.packs and _has_sliding_layers(config):
        return Architecture(row.model_type, False, True, "sliding-window layers need a mask of their own", row.frozen)
    return row


def choose_packing(requested: Literal["auto"] | Packing, config: Any) -> Packing:
    """The layout to train with. Raises ModelError if the requested one isn't exact for the architecture."""
    row = architecture_of(config)
    can_pack = row.packs and _mask_is_free(config)
    if requested == "auto":
        return "shared_prompt" if can_pack else "padded" if row.right_pads else "single"
    allowed = ["single"] + ["padded"] * row.right_pads + ["packed", "shared_prompt"] * can_pack
    if requested not in allowed:
        from lockstep.model.load import ModelError  # which needs torch, and this table does not

        raise ModelError(
            f"trainer.packing = {requested!r} is not exact for {row.model_type} ({row.note}); "
            f"exact layouts: {', '.join(allowed)}, or 'auto'"
        )
    return requested


def freeze_untrained(model: torch.nn.Module, config: Any) -> tuple[str, ...]:
    """Freeze what the architecture never trains; returns the parameters' names and says so in the log."""
    row = architecture_of(config)
    names = tuple(
        name
        for name, _ in model.named_parameters()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in row.frozen)
    )
    parameters = dict(model.named_parameters())
    for name in names:
        parameters[name].requires_grad_(False)
    if names:
        logger.warning(
            "%s: %d parameters are frozen (%s): %s", row.model_type, len(names), ", ".join(row.frozen), row.note
        )
    return names


def _has_sliding_layers(config: Any) -> bool:
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return any("sliding" in kind or "chunked" in kind for kind in layer_types)
    return getattr(config, "sliding_window", None) is not None


def _mask_is_free(config: Any) -> bool:
    """Whether the attention implementation takes a mask of any form (flash attention's kernels don't)."""
    return config._attn_implementation in ("sdpa", "eager")
