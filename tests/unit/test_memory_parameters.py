"""Parameter counts against the real modules on the meta device, and a rank's share against slicing their tensors."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.topology.catalogue import model_names, model_shape
from lockstep.topology.evidence import KnownLayout, known_layouts
from lockstep.topology.parameters import count_parameters, padded_vocab, rank_parameters
from lockstep.topology.pipeline import SplitError, split_layers
from lockstep.topology.records import ModelShape, TrainLayout
from lockstep.topology.shapes import shape_from_config
from tests.contract.tiny_models import CONFIGS

PUBLISHED = {
    "deepseek-v4-flash": {"model_type": "deepseek_v4", "compress_ratios": [0, 0, *([4, 128] * 20), 4]},
    "glm-5_2": {"model_type": "glm_moe_dsa", "index_topk_freq": 4, "index_skip_topk_offset": 3},
    "inkling": {"model_type": "inkling_text", "dense_mlp_idx": 2},
    "inkling-small": {
        "model_type": "inkling_text",
        "dense_mlp_idx": 2,
        "num_hidden_layers": 42,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "swa_num_attention_heads": 32,
        "swa_num_key_value_heads": 8,
        "intermediate_size": 16384,
        "moe_intermediate_size": 2048,
    },
    "qwen3-30b-a3b": {"model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128},
    "qwen3-4b": {
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "hidden_size": 2560,
        "num_key_value_heads": 8,
        "intermediate_size": 9728,
        "tie_word_embeddings": True,
    },
    "qwen3-0_6b": {
        "model_type": "qwen3",
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "glm-4_7-flash": {"model_type": "glm4_moe_lite"},
    "smollm2-135m": {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
}
"""What the published ``config.json`` of each catalogue entry says beside its class's defaults."""


def meta_model(fields: dict[str, Any]) -> Any:
    """The real module of a configuration without storage."""
    from transformers import AutoConfig, AutoModelForCausalLM

    rest = {key: value for key, value in fields.items() if key != "model_type"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(fields["model_type"], **rest))


def test_every_whole_model_of_the_catalogue_is_compared() -> None:
    assert {name for name in model_names() if "layer" not in name} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_count_is_right_to_the_parameter_for_a_whole_model(name: str) -> None:
    model = meta_model(PUBLISHED[name])
    parameters = dict(model.named_parameters())
    counts = count_parameters(model_shape(name))
    assert counts.total == sum(parameter.numel() for parameter in parameters.values())
    by_layer = [0] * model.config.num_hidden_layers
    for key, parameter in parameters.items():
        if match := re.search(r"\.layers\.(\d+)\.", key):
            by_layer[int(match[1])] += parameter.numel()
    assert [layer.total for layer in counts.layers] == by_layer
    assert counts.experts == sum(p.numel() for key, p in parameters.items() if re.search(r"\.experts\.", key))
    assert counts.indexer == sum(p.numel() for key, p in parameters.items() if ".indexer." in key)


@pytest.mark.parametrize(
    ("name", "total", "active_billion"),
    [
        ("qwen3-30b-a3b", 30_532_122_624, 3.353),
        ("glm-5_2", 743_377_000_704, 41.3),
        ("deepseek-v4-flash", 284_332_230_231, 13.8),
        ("inkling-small", 263_655_189_034, 12.0),
        ("inkling", 947_025_547_842, 41.06),
    ],
)
def test_the_totals_are_those_that_the_models_cards_round(name: str, total: int, active_billion: float) -> None:
    counts = count_parameters(model_shape(name))
    assert counts.total == total
    assert counts.active(model_shape(name)) / 1e9 == pytest.approx(active_billion, rel=2e-3)


# --- one rank's share, by slicing every tensor ------------------------------------------------------------------------

ROWS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "o_a_proj", "r_proj", "sinks", "k_sconv", "v_sconv")
COLUMNS = ("o_proj", "o_b_proj")


def sliced(name: str, shape: tuple[int, ...], tp: int, ep: int, etp: int) -> tuple[str, int]:
    """(bucket, elements on the first rank) of one tensor: which of its dimensions which group divides."""
    expert = re.search(r"\.experts\.(gate_up_proj|down_proj)$", name)
    if expert:
        dims = {0: ep, 1: etp} if expert[1] == "gate_up_proj" else {0: ep, 2: etp}
        return "experts", elements(shape, dims)
    part = name.removesuffix(".weight").removesuffix(".conv1d")
    # A bias of what is divided by rows is divided with them.
    last = part.removesuffix(".bias").rsplit(".", 1)[-1] if part.endswith("_proj.bias") else part.rsplit(".", 1)[-1]
    if part.endswith(".bias") and last in COLUMNS:
        return "replicated", elements(shape, {})
    if ".indexer." in name or "compressor" in name:
        return "replicated", elements(shape, {})
    if last in ("gate_proj", "up_proj"):
        return "sharded", elements(shape, {len(shape) - 2: tp})
    if last == "down_proj":
        return "sharded", elements(shape, {len(shape) - 1: tp})
    if last in ROWS:
        return "sharded", elements(shape, {0: tp})
    if last in COLUMNS:
        return "sharded", elements(shape, {1: tp})
    return "replicated", elements(shape, {})


def elements(shape: tuple[int, ...], divided: dict[int, int]) -> int:
    """Elements of one slice; the division must come out."""
    total = 1
    for dim, size in enumerate(shape):
        among = divided.get(dim, 1)
        assert size % among == 0, f"{shape} over {divided}"
        total *= len(range(0, size, among))
    return total


def enumerated(model: Any, layout: TrainLayout, stage: int, stages: tuple[tuple[int, ...], ...]) -> dict[str, int]:
    """Elements by bucket that a rank of ``stage`` holds, tensor by tensor."""
    found = {"sharded": 0, "replicated": 0, "experts": 0}
    first, last = stage == 0, stage == len(stages) - 1
    tied = not any(name.endswith("lm_head.weight") for name, _ in model.named_parameters())
    etp = layout.etp if layout.etp is not None else layout.tp
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer:
            if int(layer[1]) in stages[stage]:
                bucket, count = sliced(name, shape, layout.tp, layout.ep, etp)
                found[bucket] += count
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            padded = padded_vocab(shape[0], layout)
            here = (first or (last and tied)) if "embed" in name else last
            found["sharded"] += here * elements((padded, shape[1]), {0: layout.tp})
        else:
            found["replicated"] += elements(shape, {}) * (first if "embed_norm" in name else last)
    return found


@functools.cache
def tiny(model_type: str, tied: bool) -> tuple[Any, ModelShape]:
    """A tiny model without storage, and its shape. ``tied``: its head is its embedding."""
    sizes = CONFIGS["deepseek_v3" if model_type == "glm4_moe_lite" else model_type]
    fields = {"model_type": model_type, **sizes, "num_hidden_layers": 4, "vocab_size": 1000}
    fields |= {"tie_word_embeddings": tied}
    if model_type == "inkling_text":
        fields |= {"local_layer_ids": [0, 1, 3], "dense_mlp_idx": 1, "intermediate_size": 96}
    model = meta_model(fields)
    return model, shape_from_config(model.config.to_dict(), model_type)


TYPES = ["llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe_lite", "glm_moe_dsa", "deepseek_v4", "inkling_text"]


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(TYPES),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([{}, {"first_stage_layers": 1}, {"last_stage_layers": 1}]),
    st.booleans(),
)
def test_a_rank_holds_what_slicing_every_tensor_gives(
    model_type: str, tp: int, pp: int, ep: int, etp: int | None, split: dict[str, int], tied: bool
) -> None:
    model, shape = tiny(model_type, tied)
    layout = TrainLayout(backend="megatron", tp=tp, pp=pp, ep=ep if shape.is_moe else 1, etp=etp, **split)  # pyright: ignore[reportArgumentType]
    try:
        stages = split_layers(shape.num_layers, layout)
    except SplitError:
        return
    for stage, layers in enumerate(stages):
        held = rank_parameters(shape, layout, layers, first_stage=stage == 0, last_stage=stage == pp - 1)
        expected = enumerated(model, layout, stage, stages)
        assert {name: getattr(held, name) for name in expected} == expected


@functools.cache
def catalogued(name: str) -> Any:
    """A model of the catalogue without storage, pruned copies too."""
    base, pruned = (name, None) if name in PUBLISHED else name.rsplit("-", 1)
    fields = dict(PUBLISHED[base])
    if pruned:
        fields["num_hidden_layers"] = int(pruned.removesuffix("layer"))
    return meta_model(fields)


@pytest.mark.parametrize("known", [known for known in known_layouts() if known.job.train], ids=lambda known: known.name)
def test_every_rank_of_a_known_layout_holds_what_slicing_the_real_model_gives(known: KnownLayout) -> None:
    """Whole models of the catalogue in the layouts that somebody ran: hash layers, indexers and their shares, shared
    experts, hyper-connections, convolutions."""
    model, layout = catalogued(known.model), known.job.train
    assert layout is not None
    stages = split_layers(known.job.model.num_layers, layout)
    for stage, layers in enumerate(stages):
        ends = {"first_stage": stage == 0, "last_stage": stage == len(stages) - 1}
        held = rank_parameters(known.job.model, layout, layers, **ends)
        expected = enumerated(model, layout, stage, stages)
        assert {name: getattr(held, name) for name in expected} == expected


def test_a_key_head_that_does_not_divide_is_whole_on_every_rank() -> None:
    layout = TrainLayout(backend="megatron", tp=4)
    shape = model_shape("qwen3-30b-a3b")  # four key heads
    four, eight = (
        rank_parameters(shape, replaced, [0], first_stage=False, last_stage=False)
        for replaced in (layout, TrainLayout(backend="megatron", tp=8))
    )
    queries = 2 * 2048 * 4096
    keys_values = 2 * 2048 * 4 * 128
    assert four.sharded == queries // 4 + keys_values // 4
    assert eight.sharded == queries // 8 + keys_values // 4


def test_all_ranks_together_hold_the_model_once() -> None:
    """Sharded parts times tp, experts times ep: nothing is lost between the stages."""
    shape = model_shape("deepseek-v4-flash")
    layout = TrainLayout(backend="megatron", tp=4, pp=4, ep=8, etp=1, first_stage_layers=11, last_stage_layers=10)
    stages = split_layers(shape.num_layers, layout)
    held = [
        rank_parameters(shape, layout, layers, first_stage=index == 0, last_stage=index == 3)
        for index, layers in enumerate(stages)
    ]
    padding = 2 * (padded_vocab(shape.vocab, layout) - shape.vocab) * shape.hidden
    total = sum(4 * one.sharded + one.replicated + 8 * one.experts for one in held)
    assert total - padding == count_parameters(shape).total


def layouts_of_padding() -> Iterator[tuple[int, int, int, int]]:
    yield from [(154_880, 8, 128, 155_648), (154_880, 8, 16, 154_880), (129_280, 4, 128, 129_536)]
    yield from [(129_280, 8, 128, 130_048), (201_024, 4, 128, 201_216)]


@pytest.mark.parametrize(("vocab", "tp", "divisor", "padded"), list(layouts_of_padding()))
def test_the_vocabulary_is_padded_as_megatron_does(vocab: int, tp: int, divisor: int, padded: int) -> None:
    assert padded_vocab(vocab, TrainLayout(tp=tp, vocab_divisor=divisor)) == padded
