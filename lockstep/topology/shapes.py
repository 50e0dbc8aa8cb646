"""A Hugging Face ``config.json`` as a ``ModelShape``, for the architectures whose parameters and caches are counted.

A key that the configuration leaves out has transformers' own default (that of its configuration class, which a test
compares): it is what the model is built with. Lists of layers are read in both spellings: transformers'
(``layer_types``, ``mlp_layer_types``, ``indexer_types``) and the checkpoints' (``compress_ratios``,
``local_layer_ids``, ``first_k_dense_replace``, ``index_topk_freq``). What the formulas do not cover is refused by
name, all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.config.errors import ConfigError, Violation
from lockstep.topology.records import ModelShape

_NESTED = {"inkling_mm_model": "inkling_text"}


@dataclass(slots=True)
class _Reader:
    """Reads a configuration and collects what is wrong with it."""

    config: Mapping[str, Any]
    problems: list[Violation] = field(default_factory=list)

    def number(self, default: int, *keys: str, least: int = 1) -> int:
        """The integer under the first of ``keys`` that is there and not null, else ``default``."""
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            if isinstance(value, int) and not isinstance(value, bool) and value >= least:
                return value
            self.refuse(key, f"{key} = {value!r} is no integer of at least {least}", f"an integer, such as {default}")
            return default
        return default

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.config.get(key)
        return default if value is None else bool(value)

    def refuse(self, key: str, message: str, way_out: str) -> None:
        self.problems.append(Violation(key, message, way_out))

    def kinds(self, key: str, known: Mapping[Any, Any], num_layers: int) -> list[Any] | None:
        """``known[entry]`` for each entry of the list under ``key``; None if it is not there."""
        found = self.config.get(key)
        if found is None:
            return None
        if not isinstance(found, list | tuple) or any(entry not in known for entry in found):
            self.refuse(key, f"{key} has entries that are not counted: {found!r}", f"of {', '.join(map(str, known))}")
            return None
        if len(found) < num_layers:
            self.refuse(key, f"{key} has {len(found)} entries for {num_layers} layers", "one entry a layer")
            return None
        return [known[entry] for entry in found[:num_layers]]


def known_model_types() -> tuple[str, ...]:
    """Values of ``model_type`` that ``shape_from_config`` reads."""
    return tuple(sorted([*_ARCHITECTURES, *_NESTED]))


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape of a model from its ``config.json`` (a nested ``text_config`` is taken out first).

    Raises ConfigError with every problem: an architecture that is not counted, a size of the wrong type, a variation
    that the formulas don't cover.
    """
    text = config.get("text_config")
    # A text_config of a plain language model has its own model_type; Inkling's may leave it out.
    inner: Mapping[str, Any] = {**text} if isinstance(text, Mapping) else config
    kind = str(inner.get("model_type") or config.get("model_type"))
    kind = _NESTED.get(kind, kind)
    if kind not in _ARCHITECTURES:
        known = ", ".join(known_model_types())
        problem = Violation("model_type", f"parameters of {kind!r} are not counted", "use one of these", allowed=known)
        raise ConfigError(name, [problem])
    reader = _Reader(inner)
    architecture, read = _ARCHITECTURES[kind]
    fields = read(reader)
    if reader.problems:
        raise ConfigError(name, reader.problems)
    return ModelShape(name=name, model_type=kind, architecture=architecture, **fields)


def _common(read: _Reader, *, layers: int, hidden: int, vocab: int, heads: int, kv_heads: int | None) -> dict[str, Any]:
    num_heads = read.number(heads, "num_attention_heads")
    return {
        "num_layers": read.number(layers, "num_hidden_layers"),
        "hidden": read.number(hidden, "hidden_size"),
        "vocab": read.number(vocab, "vocab_size"),
        "num_heads": num_heads,
        "num_kv_heads": read.number(kv_heads or num_heads, "num_key_value_heads"),
        "tied_embeddings": read.flag("tie_word_embeddings"),
    }


def _llama(read: _Reader) -> dict[str, Any]:
    common = _common(read, layers=32, hidden=4096, vocab=32000, heads=32, kv_heads=None)
    _no_biased_mlp(read)
    return {
        **common,
        "head_dim": read.number(common["hidden"] // common["num_heads"], "head_dim"),
        "attention_bias": read.flag("attention_bias"),
        "ffn": read.number(11008, "intermediate_size"),
    }


def _qwen2(read: _Reader) -> dict[str, Any]:
    common = _common(read, layers=32, hidden=4096, vocab=151936, heads=32, kv_heads=32)
    _no_windows(read)
    return {
        **common,
        "head_dim": read.number(common["hidden"] // common["num_heads"], "head_dim"),
        "attention_bias": True,
        "ffn": read.number(22016, "intermediate_size"),
    }


def _qwen3(read: _Reader) -> dict[str, Any]:
    _no_windows(read)
    return {
        **_common(read, layers=32, hidden=4096, vocab=151936, heads=32, kv_heads=32),
        "head_dim": read.number(128, "head_dim"),
        "qk_norm": True,
        "attention_bias": read.flag("attention_bias"),
        "ffn": read.number(22016, "intermediate_size"),
    }


def _qwen3_moe(read: _Reader) -> dict[str, Any]:
    _no_windows(read)
    common = _common(read, layers=24, hidden=2048, vocab=151936, heads=32, kv_heads=4)
    if read.number(1, "decoder_sparse_step") != 1:
        read.refuse("decoder_sparse_step", "dense layers between sparse ones are not counted", "1")
    dense = sorted(read.config.get("mlp_only_layers") or ())
    if dense != list(range(len(dense))):
        read.refuse("mlp_only_layers", f"dense layers {dense} are not the first ones", "leading layers only")
    return {
        **common,
        "head_dim": read.number(common["hidden"] // common["num_heads"], "head_dim"),
        "qk_norm": True,
        "attention_bias": read.flag("attention_bias"),
        "ffn": read.number(6144, "intermediate_size") if dense else 0,
        "dense_layers": len(dense),
        "num_experts": read.number(128, "num_experts", "num_local_experts"),
        "experts_per_token": read.number(8, "num_experts_per_tok"),
        "moe_ffn": read.number(768, "moe_intermediate_size"),
        "router_score": "softmax",
    }


def _mla(read: _Reader, *, layers: int, hidden: int, heads: int, ffn: int, dense: int, experts: int) -> dict[str, Any]:
    common = _common(read, layers=layers, hidden=hidden, vocab=154880, heads=heads, kv_heads=heads)
    nope, rope = read.number(192, "qk_nope_head_dim"), read.number(64, "qk_rope_head_dim")
    if read.flag("attention_bias"):
        read.refuse("attention_bias", "biased projections of MLA are not counted", "false")
    return {
        **common,
        "head_dim": nope + rope,
        "ffn": read.number(ffn, "intermediate_size"),
        "dense_layers": _leading_dense(read, common["num_layers"], dense),
        "num_experts": read.number(experts, "n_routed_experts", "num_local_experts", "num_experts"),
        "num_shared_experts": read.number(1, "n_shared_experts", least=0),
        "router_score": "sigmoid",
        "kv_lora_rank": read.number(512, "kv_lora_rank"),
        "qk_nope_head_dim": nope,
        "rope_head_dim": rope,
        "v_head_dim": read.number(256, "v_head_dim"),
        "mtp_layers": read.number(0, "num_nextn_predict_layers", least=0),
    }


def _glm4_moe_lite(read: _Reader) -> dict[str, Any]:
    ranked = "q_lora_rank" not in read.config or read.config["q_lora_rank"] is not None
    return {
        **_mla(read, layers=47, hidden=2048, heads=20, ffn=10240, dense=1, experts=64),
        "attention": "mla",
        "experts_per_token": read.number(4, "num_experts_per_tok"),
        "moe_ffn": read.number(1536, "moe_intermediate_size"),
        "q_lora_rank": read.number(768, "q_lora_rank") if ranked else 0,
    }


def _glm_moe_dsa(read: _Reader) -> dict[str, Any]:
    fields = _mla(read, layers=78, hidden=6144, heads=64, ffn=12288, dense=3, experts=256)
    return {
        **fields,
        "attention": "mla_dsa",
        "experts_per_token": read.number(8, "num_experts_per_tok"),
        "moe_ffn": read.number(2048, "moe_intermediate_size"),
        "q_lora_rank": read.number(2048, "q_lora_rank"),
        "indexer_heads": read.number(32, "index_n_heads"),
        "indexer_head_dim": read.number(128, "index_head_dim"),
        "indexer_topk": read.number(2048, "index_topk"),
        "index_layers": _index_layers(read, fields["num_layers"]),
    }


def _deepseek_v4(read: _Reader) -> dict[str, Any]:
    common = _common(read, layers=43, hidden=4096, vocab=129280, heads=64, kv_heads=1)
    head_dim = read.number(512, "head_dim")
    factor = read.config.get("partial_rotary_factor") or 64 / 512
    return {
        **common,
        "head_dim": head_dim,
        "attention": "deepseek_v4",
        "num_experts": read.number(256, "n_routed_experts", "num_local_experts"),
        "experts_per_token": read.number(6, "num_experts_per_tok"),
        "num_shared_experts": read.number(1, "n_shared_experts"),
        "moe_ffn": read.number(2048, "moe_intermediate_size"),
        "router_score": "sqrtsoftplus",
        "q_lora_rank": read.number(1024, "q_lora_rank"),
        "rope_head_dim": read.number(int(head_dim * factor), "qk_rope_head_dim"),
        "o_groups": read.number(8, "o_groups"),
        "o_lora_rank": read.number(1024, "o_lora_rank"),
        "sliding_window": read.number(128, "sliding_window"),
        "compress_ratios": _compress_ratios(read, common["num_layers"]),
        "hash_layers": _hash_layers(read, common["num_layers"]),
        "hyper_connections": read.number(4, "hc_mult"),
        "indexer_heads": read.number(64, "index_n_heads"),
        "indexer_head_dim": read.number(128, "index_head_dim"),
        "indexer_topk": read.number(512, "index_topk"),
        "mtp_layers": read.number(1, "num_nextn_predict_layers", least=0),
    }


def _inkling(read: _Reader) -> dict[str, Any]:
    common = _common(read, layers=66, hidden=6144, vocab=201024, heads=64, kv_heads=8)
    head_dim, num_layers = read.number(128, "head_dim"), common["num_layers"]
    for key, default, here in (
        ("swa_num_attention_heads", 64, common["num_heads"]),
        ("swa_head_dim", 128, head_dim),
    ):
        if (local := read.number(default, key)) != here:
            read.refuse(key, f"windowed layers with {local} where global ones have {here} are not counted", f"{here}")
    local = read.config.get("local_layer_ids")
    kinds = read.kinds("layer_types", {"hybrid_sliding": True, "hybrid": False}, num_layers)
    if kinds is None:
        kinds = [layer in local if local is not None else bool((layer + 1) % 6) for layer in range(num_layers)]
    dense = read.number(0, "dense_mlp_idx", least=0)
    return {
        **common,
        "head_dim": head_dim,
        "tied_embeddings": False,  # whatever is configured: the class has a head of its own
        "attention": "inkling",
        "ffn": read.number(24576, "dense_intermediate_size", "intermediate_size"),
        "dense_layers": _leading_dense(read, num_layers, dense),
        "num_experts": read.number(256, "n_routed_experts", "num_local_experts"),
        "experts_per_token": read.number(6, "num_experts_per_tok"),
        "num_shared_experts": read.number(2, "n_shared_experts"),
        "moe_ffn": read.number(3072, "moe_intermediate_size"),
        "router_score": "sigmoid",
        "sliding_window": read.number(512, "sliding_window_size", "sliding_window"),
        "window_layers": tuple(layer for layer, windowed in enumerate(kinds) if windowed),
        "window_kv_heads": read.number(16, "swa_num_key_value_heads"),
        "relative_dim": read.number(16, "d_rel"),
        "relative_extent": read.number(1024, "rel_extent"),
        "conv_kernel": read.number(4, "conv_kernel_size", "sconv_kernel_size"),
        "mtp_layers": read.number(0, "num_mtp_layers", least=0),
    }


_ARCHITECTURES: dict[str, tuple[str, Callable[[_Reader], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", _glm4_moe_lite),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", _glm_moe_dsa),
    "deepseek_v4": ("DeepseekV4ForCausalLM", _deepseek_v4),
    "inkling_text": ("InklingForCausalLM", _inkling),
}


# --- lists of layers --------------------------------------------------------------------------------------------------


def _leading_dense(read: _Reader, num_layers: int, default: int) -> int:
    """How many of the first layers are dense; a dense layer after a sparse one is refused."""
    kinds = read.kinds("mlp_layer_types", {"dense": True, "sparse": False}, num_layers)
    if kinds is None:
        return min(read.number(default, "first_k_dense_replace", least=0), num_layers)
    count = sum(kinds)
    if kinds != [True] * count + [False] * (num_layers - count):
        read.refuse("mlp_layer_types", "a dense layer follows a sparse one, which is not counted", "dense layers first")
    return count


def _compress_ratios(read: _Reader, num_layers: int) -> tuple[int, ...]:
    """Per layer: 4 (indexed, overlapping windows), a larger ratio (heavily compressed), 0 (window only)."""
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    rates.update(read.config.get("compress_rates") or {})
    sparse = read.number(rates["compressed_sparse_attention"], "compress_rate_csa")
    heavy = read.number(rates["heavily_compressed_attention"], "compress_rate_hca")
    if sparse != 4:
        read.refuse("compress_rates", f"an indexed ratio of {sparse} is not counted", "4")
    known = {"compressed_sparse_attention": sparse, "heavily_compressed_attention": heavy, "sliding_attention": 0}
    kinds = read.kinds("layer_types", known, num_layers)
    if kinds is None:
        kinds = read.kinds("compress_ratios", {0: 0, 4: sparse, 128: heavy}, num_layers)
    if kinds is None:  # transformers' default, which is the schedule of the larger sibling
        kinds = [heavy if layer < 2 or layer % 2 == 0 else sparse for layer in range(num_layers)]
    return tuple(kinds)


def _hash_layers(read: _Reader, num_layers: int) -> int:
    kinds = read.kinds("mlp_layer_types", {"hash_moe": True, "moe": False}, num_layers)
    return sum(kinds) if kinds is not None else min(read.number(3, "num_hash_layers", least=0), num_layers)


def _index_layers(read: _Reader, num_layers: int) -> tuple[int, ...]:
    kinds = read.kinds("indexer_types", {"full": True, "shared": False}, num_layers)
    pattern = read.config.get("index_topk_pattern")
    if kinds is None and pattern is not None:
        kinds = [entry in ("F", "full") for entry in pattern][:num_layers]
    if kinds is None:
        period = read.number(1, "index_topk_freq")
        offset = read.number(2, "index_skip_topk_offset", least=0)
        kinds = [max(layer - offset + 1, 0) % period == 0 for layer in range(num_layers)]
    return tuple(layer for layer, full in enumerate(kinds) if full)


def _no_biased_mlp(read: _Reader) -> None:
    if read.flag("mlp_bias"):
        read.refuse("mlp_bias", "biased MLPs are not counted", "false")


def _no_windows(read: _Reader) -> None:
    if read.flag("use_sliding_window"):
        read.refuse("use_sliding_window", "a window changes the cache, which is not counted", "false")
