"""Which model a launch command means: by the name of its checkpoint, by its ``config.json``, or by Megatron's sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from lockstep.config.errors import ConfigError, Violation
from lockstep.topology.catalogue import model_names, model_shape, prune
from lockstep.topology.launch_precision import Quantisation, precision_by_config, precision_by_name, published
from lockstep.topology.records import Attention, Finding, ModelShape

_DECORATION = re.compile(
    r"([-_](fp8|bf16|fp16|mxfp4|nvfp4|int4|int8|awq|gptq|w4a16|base|instruct|it|chat|thinking|hf|torch[-_]dist|torch|mcore|miles|"
    r"slime|megatron|dist|converted|\d{4}))+$"
)
_ALIASES = {
    "glm5.2-744b-a40b": "glm-5_2",
    "glm4.7-flash": "glm-4_7-flash",
    "smollm2-135m-instruct": "smollm2-135m",
}
_REQUIRED = ("num_layers", "hidden", "num_heads")
MAX_LAYERS, MAX_SIZE = 512, 1 << 24
_SHOWN = {"num_layers", "hidden", "num_heads", "num_kv_heads", "num_experts", "experts_per_token", "moe_ffn", "vocab"}


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with where it is known from ("catalogue", "config.json", "the flags") and what that lacks."""

    shape: ModelShape
    origin: str
    quantisation: Quantisation = "none"
    findings: tuple[Finding, ...] = ()
    assumptions: tuple[str, ...] = ()


def catalogue_name(path: str) -> str | None:
    """The model of the catalogue that a path or a hub's id names, whatever its precision or conversion.

    Example: ``/data/Qwen3-30B-A3B-FP8/`` is "qwen3-30b-a3b".
    """
    if len(path) > 4096:
        return None
    known = {name.replace("_", "."): name for name in model_names()}
    for piece in reversed([piece for piece in re.split(r"[/\\]", path) if piece][-3:]):
        name = piece.lower().removesuffix(".sh").removesuffix(".py")
        for candidate in (name, _DECORATION.sub("", name)):
            plain = re.sub(r"[-_](\d+)-?layers?$", r"-\1layer", candidate)
            plain = _ALIASES.get(plain, plain)
            dotted = plain.replace("_", ".")
            if plain in known.values() or dotted in known:
                return plain if plain in known.values() else known[dotted]
            base, _, layers = dotted.rpartition("-")
            if re.fullmatch(r"[1-9][0-9]?layer", layers) and base in known:
                return known[base]
    return None


def pruned_layers(path: str) -> int | None:
    """The number of layers of a pruned copy by its name ("…-4layer"), None for a whole model."""
    match = re.search(r"[-_](\d{1,3})-?layers?(?:$|[-_/.])", path.lower().rstrip("/"))
    return int(match.group(1)) if match else None


def identify(
    path: str,
    sizes: Mapping[str, Any],
    settings: Mapping[str, Any],
    read_config: Callable[[str], Mapping[str, Any] | None] | None,
) -> KnownModel | None:
    """The model of a launch, None if nothing says which.

    ``path`` is the checkpoint ("" if there is none), ``sizes`` what Megatron's flags say, by field of `ModelShape`;
    ``read_config`` returns a local checkpoint's configuration. Flags that disagree with the checkpoint are a finding.
    """
    config = read_config(path) if read_config and path and len(path) < 4096 else None
    if config is not None:
        from lockstep.topology.shapes import shape_from_config

        shape = shape_from_config(config, catalogue_name(path) or path.rstrip("/").rpartition("/")[2] or path)
        quantisation, assumed = precision_by_config(config) or precision_by_name(path) or ("none", ())
        return _compared(KnownModel(shape, f"{path}/config.json", quantisation, (), assumed), sizes)
    name = catalogue_name(path)
    if name is not None:
        shape = model_shape(name)
        layers = pruned_layers(path)
        if layers is not None and layers < shape.num_layers:
            shape = prune(shape, layers)
        quantisation, assumed = precision_by_name(path) or published(path, name)
        return _compared(KnownModel(shape, f"the catalogue, as {name}", quantisation, (), assumed), sizes)
    if all(size in sizes for size in _REQUIRED):
        return _from_sizes(path, sizes, settings)
    return None


def _compared(known: KnownModel, sizes: Mapping[str, Any]) -> KnownModel:
    """The model with a finding for each size that the flags give otherwise; the flags' layers count."""
    shape = known.shape
    mine = {item.name: getattr(shape, item.name) for item in fields(ModelShape)}
    found: list[Finding] = []
    for size in sorted(_SHOWN & set(sizes)):
        if sizes[size] == mine[size] or (size == "num_kv_heads" and shape.attention != "gqa"):
            continue
        flag = _flag_of(size)
        message = f"{flag} {sizes[size]}, but {shape.name} has {mine[size]} by {known.origin}"
        repair = f"{flag} {sizes[size]} → {mine[size]}"
        source = "Megatron builds the model from its flags; the checkpoint then does not fit it"
        found.append(Finding("model-sizes", "error", message, repair, source))
    layers = sizes.get("num_layers")
    if isinstance(layers, int) and 0 < layers < shape.num_layers:
        shape = prune(shape, layers)
    return replace(known, shape=shape, findings=tuple(found))


def _flag_of(size: str) -> str:
    from lockstep.topology.flags_megatron import MODEL

    return next((flag for flag, row in MODEL.items() if row.target == f"model.{size}"), size)


def _from_sizes(path: str, sizes: Mapping[str, Any], settings: Mapping[str, Any]) -> KnownModel:
    """A shape from Megatron's own flags. Missing sizes are Megatron's defaults (``TransformerConfig``). Raises
    ConfigError for sizes that no model has."""
    limits = {name: MAX_LAYERS if name == "num_layers" else MAX_SIZE for name in sizes}
    problems = [
        Violation(_flag_of(name), f"{_flag_of(name)} {value} is beyond any model", f"give 0 to {limits[name]}")
        for name, value in sizes.items()
        if isinstance(value, int) and not 0 <= value <= limits[name]
    ]
    if problems or sizes["num_layers"] < 1:
        raise ConfigError("the model's sizes", problems or [Violation("--num-layers", "no layers", "give at least 1")])
    heads, hidden = sizes["num_heads"], sizes["hidden"]
    experts = sizes.get("num_experts", 0)
    assumptions: list[str] = []
    if "vocab" not in sizes:
        assumptions.append("--vocab-size is not given: the plan leaves the embedding and the head out")
    if not settings.get("launch.swiglu"):
        assumptions.append("--swiglu is not given: MLPs are counted with a gate all the same")
    moe_ffn = sizes.get("moe_ffn", sizes.get("ffn", 4 * hidden)) if experts else 0
    shared = settings.get("launch.shared_ffn", 0)
    variant = settings.get("launch.attention_variant")
    attention: Attention = "gqa"
    if settings.get("launch.mla"):
        attention = "mla_dsa" if variant == "dsa" else "mla"
    grouped = settings.get("train.switches.group_query_attention") or "num_kv_heads" in sizes
    shape = ModelShape(
        name=path.rstrip("/").rpartition("/")[2] or "a model of these sizes",
        model_type="",
        num_layers=sizes["num_layers"],
        hidden=hidden,
        vocab=sizes.get("vocab", 0),
        num_heads=heads,
        num_kv_heads=sizes.get("num_kv_heads", 1) if grouped and attention == "gqa" else heads,
        head_dim=sizes.get("head_dim") or max(1, hidden // max(1, heads)),
        attention=attention,
        qk_norm=sizes.get("qk_norm", False),
        attention_bias=sizes.get("attention_bias", False),
        tied_embeddings=sizes.get("tied_embeddings", True),
        ffn=sizes.get("ffn", 4 * hidden),
        dense_layers=sizes.get("dense_layers", 0) if experts else 0,
        num_experts=experts,
        experts_per_token=sizes.get("experts_per_token", 2) if experts else 0,
        num_shared_experts=shared // moe_ffn if experts and moe_ffn and shared else 0,
        moe_ffn=moe_ffn,
        router_score=sizes.get("router_score", "softmax") if experts else None,
        mtp_layers=sizes.get("mtp_layers", 0),
        **{
            name: sizes.get(name, 0)
            for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "rope_head_dim", "v_head_dim")
            if attention != "gqa"
        },
    )
    quantisation, assumed = precision_by_name(path) or published(path)
    return KnownModel(shape, "the flags' sizes", quantisation, (), (*assumptions, *assumed))


def unknown_shape(num_experts: int) -> ModelShape:
    """What stands for a model that is not known; only rules that read nothing of it may judge it."""
    return ModelShape(
        name="a model that is not known",
        model_type="",
        num_layers=1,
        hidden=1,
        vocab=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        num_experts=num_experts,
    )
