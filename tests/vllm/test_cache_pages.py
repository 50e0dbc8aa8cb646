"""The planner's bytes of a page against the specifications that vLLM's own attention layers hand out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep.rollout.vllm_start import import_vllm
from lockstep.topology.cache import cache_cost
from lockstep.topology.catalogue import model_shape
from lockstep.topology.records import EngineLayout

import_vllm()

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec  # noqa: E402  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.lane("stage-a-vllm", hardware={"cpu": "cpu"}, minutes=0.5, owner="vllm", labels=["vllm"])


def page(row: int, ratio: int, alignment: int, dtype: torch.dtype) -> int:
    """Bytes of a page of 256 tokens with rows of ``row`` bytes, each for ``ratio`` tokens."""
    spec = MLAAttentionSpec(
        block_size=256,
        num_kv_heads=1,
        head_size=row // dtype.itemsize,
        dtype=dtype,
        tokens_per_state=ratio,
        alignment=alignment,
    )
    return spec.page_size_bytes


@pytest.mark.skipif("tokens_per_state" not in MLAAttentionSpec.__dataclass_fields__, reason="an older vLLM's fields")
def test_pages_of_deepseek_v4_are_as_large_as_the_plan_counts() -> None:
    shape = model_shape("deepseek-v4-flash")
    fp8 = page(584, 4, 576, torch.uint8), page(584, 128, 576, torch.uint8), page(132, 4, 576, torch.uint8)
    bf16 = page(1024, 4, 512, torch.bfloat16), page(1024, 128, 512, torch.bfloat16), page(132, 4, 512, torch.uint8)
    plain = EngineLayout(engine="vllm")
    for engine, (sparse, heavy, index) in ((replace(plain, kv_cache_dtype="fp8"), fp8), (plain, bf16)):
        planned = cache_cost(shape, engine).per_token
        assert planned * 256 == 21 * (sparse + index) + 20 * heavy


@pytest.mark.parametrize(("model", "kv_heads", "tp"), [("qwen3-30b-a3b", 4, 1), ("qwen3-4b", 8, 4)])
def test_pages_of_grouped_heads_are_as_large_as_the_plan_counts(model: str, kv_heads: int, tp: int) -> None:
    shape = model_shape(model)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=kv_heads // tp, head_size=128, dtype=torch.bfloat16)
    planned = cache_cost(shape, EngineLayout(engine="vllm", tp=tp)).per_token
    assert planned * 16 == shape.num_layers * spec.page_size_bytes
