"""Which tensors a checkpoint must have, by model family: lists written from the published files.

Nothing here is derived from the tables by which Lockstep renames and writes tensors (``refit/name_tables.py``), so that
each can show a mistake of the other; a test holds both against transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.checkpoint.errors import Problem, shown
from lockstep.checkpoint.expected import deepseek_v4, glm, inkling, llama
from lockstep.checkpoint.expected.rows import Layout, Reader

FAMILIES: dict[str, Callable[[Reader, str], Layout]] = {
    "llama": llama.layout,
    "mistral": llama.layout,
    "qwen2": llama.layout,
    "qwen3": llama.layout,
    "qwen3_moe": llama.layout,
    "glm_moe_dsa": glm.layout,
    "deepseek_v4": deepseek_v4.layout,
    "inkling_mm_model": inkling.layout,
    "inkling_text": inkling.layout,
}
"""transformers' model types whose published layout is known here."""


def read_layout(config: Mapping[str, Any], problems: list[Problem]) -> Layout | None:
    """The layout that an untrusted ``config.json`` describes; None, with a problem, if its model type is unknown."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        text = f"model_type {shown(model_type)} has no list of tensors here; known: {', '.join(FAMILIES)}"
        problems.append(Problem("config.json is refused", text))
        return None
    return FAMILIES[model_type](Reader(config, problems), model_type)
