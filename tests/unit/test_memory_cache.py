"""Bytes of each model's cache, against the numbers that follow from its layers and against the real caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.model.adapter import SplitModel
from lockstep.topology.cache import cache_cost
from lockstep.topology.catalogue import model_shape
from lockstep.topology.records import EngineLayout
from lockstep.topology.shapes import shape_from_config
from tests.contract.tiny_models import tiny_model


@pytest.mark.parametrize(
    ("name", "dtype", "per_token", "per_request"),
    [
        ("qwen3-30b-a3b", "bf16", 98_304, 0),
        ("glm-5_2", "bf16", 89_856 + 2_772, 0),
        ("glm-5_2", "fp8", 51_168 + 2_772, 0),
        ("deepseek-v4-flash", "fp8", 3_850.25, 3_214_336 + 12_206_080),
        ("deepseek-v4-flash", "bf16", 6_229, 5_636_096 + 12_206_080),
        ("inkling-small", "bf16", 28_672, 73_400_320 + 5_160_960),
        ("inkling", "bf16", 45_056, 230_686_720 + 12_705_792),
    ],
)
def test_a_token_costs_what_the_models_layers_keep(name: str, dtype: Any, per_token: float, per_request: int) -> None:
    cost = cache_cost(model_shape(name), EngineLayout(engine="sglang", kv_cache_dtype=dtype))
    assert cost.per_token == per_token
    assert cost.per_request == per_request


def test_vllms_pages_of_deepseek_v4_are_filled_up() -> None:
    """Of 256 tokens: 64 rows of 584 bytes in 65 · 576, two in 3 · 576, 64 index rows of 132 in 15 · 576; plain rows of
    1024 bytes fill theirs, and index rows take 17 · 512."""
    shape, engine = model_shape("deepseek-v4-flash"), EngineLayout(engine="vllm", kv_cache_dtype="fp8")
    assert cache_cost(shape, engine).per_token == (21 * (65 + 15) + 20 * 3) * 576 / 256 == 3915
    plain = cache_cost(shape, replace(engine, kv_cache_dtype="bf16")).per_token
    assert plain == (21 * (64 * 1024 + 17 * 512) + 20 * 2 * 1024) / 256


def test_tensor_parallel_divides_heads_and_never_a_latent() -> None:
    def per_token(name: str, tp: int) -> float:
        return cache_cost(model_shape(name), EngineLayout(engine="vllm", tp=tp)).per_token

    assert per_token("qwen3-30b-a3b", 4) == 98_304 / 4
    assert per_token("qwen3-30b-a3b", 8) == 98_304 / 4  # four heads: one is repeated
    assert per_token("glm-5_2", 8) == per_token("glm-5_2", 1)


def test_data_parallel_attention_of_sglang_takes_ranks_from_tensor_parallel() -> None:
    shape = model_shape("qwen3-30b-a3b")
    shared = EngineLayout(engine="sglang", tp=4, dp=4, dp_attention=True)
    assert cache_cost(shape, shared).per_token == 98_304
    assert cache_cost(shape, replace(shared, engine="vllm")).per_token == 98_304 / 4


@given(st.integers(1, 64), st.integers(1, 100_000), st.sampled_from(["qwen3-30b-a3b", "glm-5_2", "deepseek-v4-flash"]))
def test_a_pool_of_what_requests_need_holds_their_tokens(requests: int, tokens: int, name: str) -> None:
    cost = cache_cost(model_shape(name), EngineLayout(engine="sglang"))
    held = cost.tokens_in(cost.bytes_of(requests, tokens) + 1, requests)
    assert held is not None
    assert abs(held - requests * tokens) <= 1


def test_a_model_without_global_layers_has_no_limit_of_tokens() -> None:
    cost = cache_cost(model_shape("inkling-small-4layer"), EngineLayout(engine="sglang"))
    assert cost.per_token == 0
    assert cost.tokens_in(10 << 30, 8) is None
    assert cost.tokens_in(1, 8) == 0


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "glm_moe_dsa", "deepseek_v4", "inkling_text"])
def test_the_embedded_engines_cache_grows_by_the_counted_bytes(model_type: str) -> None:
    model = tiny_model(model_type)
    shape = shape_from_config(model.config.to_dict(), model_type)
    cost = cache_cost(shape, EngineLayout(engine="torch", kv_cache_dtype="fp32"))
    split = SplitModel(model)

    def cached(num_tokens: int) -> int:
        cache = split.new_cache()
        with torch.no_grad():
            split.hidden(torch.arange(num_tokens)[None] % 97, cache=cache)
        return sum(tensor.nbytes for layer in cache.layers for tensor in _tensors(vars(layer)) if tensor.ndim > 1)

    # Past every window, a whole number of compressed rows.
    assert cached(128) - cached(64) == round(64 * cost.per_token)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for each in values for tensor in _tensors(each)]
