"""A model as the folder that vLLM starts from: ``config.json``, and the weights if they are wanted.

No tokenizer: token ids go in and token ids come out. ``EXTRA_FIELDS`` are fields that a published config has, that
vLLM reads, and that transformers' own class for the architecture does not write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXTRA_FIELDS: dict[str, dict[str, Any]] = {
    # Without it vLLM makes no e_score_correction_bias, and the router ignores it (deepseek-ai/DeepSeek-V3 config.json).
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "deepseek_v32": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}


def write_model_folder(
    model: PreTrainedModel, folder: Path, *, weights: bool = False, quantisation: dict[str, Any] | None = None
) -> Path:
    """Write ``model``'s configuration into ``folder``, and its weights under checkpoint names if asked. Returns it.

    ``quantisation``: the ``quantization_config`` of the weights that an engine is to be refitted with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if weights:
        model.save_pretrained(folder)
    values: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    values["architectures"] = [type(model).__name__]
    # De-quantised when it was loaded (a GGUF file): what travels is plain.
    values.pop("quantization_config", None)
    if quantisation is not None:
        values["quantization_config"] = quantisation
    for name, value in EXTRA_FIELDS.get(str(values.get("model_type")), {}).items():
        values.setdefault(name, value)
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return folder


def folder_config(model: PreTrainedModel) -> dict[str, Any]:
    """What ``config.json`` of a model's folder says, with the fields that vLLM reads and transformers leaves out."""
    values: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    values["architectures"] = [type(model).__name__]
    # De-quantised when it was loaded (a GGUF file): what travels is plain.
    values.pop("quantization_config", None)
    for name, value in EXTRA_FIELDS.get(str(values.get("model_type")), {}).items():
        values.setdefault(name, value)
    return values
