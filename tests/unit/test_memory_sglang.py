"""SGLang's own sums of its cache, by hand from its pool configurators (0.5.16), and what its pools take beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.topology.catalogue import hardware, model_shape
from lockstep.topology.evidence import known_layouts
from lockstep.topology.memory import plan_memory
from lockstep.topology.records import EngineLayout, Job
from lockstep.topology.sglang_pool import default_fraction, sglang_pool

KNOWN = {known.name: known for known in known_layouts()}
UNIFIED = {"engine": {"SGLANG_HACK_FLASHMLA_BACKEND": "unified_kv_triton"}}


def served(model: str, device: str = "h200", environment: Any = None, **engine: Any) -> Job:
    """An SGLang engine alone."""
    layout = EngineLayout(engine="sglang", **engine)
    job = Job(name="served", model=model_shape(model), hardware=hardware(device), train=None, engine=layout)
    return replace(job, environment=environment or {})


@pytest.mark.parametrize(
    ("model", "settings", "per_token"),
    [
        ("qwen3-30b-a3b", {}, 98_304),
        ("qwen3-30b-a3b", {"tp": 4}, 24_576),
        # 576 numbers and 132 bytes of an index row in each of 78 layers.
        ("glm-5_2", {"kv_cache_dtype": "fp8"}, 78 * (576 + 132)),
        ("glm-5_2", {"kv_cache_dtype": "bf16"}, 78 * (1152 + 132)),
        ("glm-5_2", {"kv_cache_dtype": "fp8", "speculative": True}, 78 * (576 + 132) * 79 / 78),
        ("glm-4_7-flash", {"kv_cache_dtype": "bf16"}, 47 * 1152),
        # Windows 0.1 · 584 · 43, rows 584 · (21/4 + 20/128), index 132/4 · 21, ring states 0.1 · 8/128 · 10,240 · 21.
        ("deepseek-v4-flash", {"kv_cache_dtype": "fp8"}, 2511.2 + 3157.25 + 693 + 1344),
        # A draft's ring is twice as long, and one layer more is paid for.
        ("deepseek-v4-flash", {"speculative": True}, (2511.2 + 3157.25 + 693 + 2688) * 44 / 43),
        # Seven global layers, and a tenth of the tokens in 35 windowed ones; four kilobytes a layer.
        ("inkling-small", {}, 4096 * (7 + 3.5)),
        ("inkling", {"tp": 16}, 512 * (11 + 5.5)),  # one head of each kind on a rank
    ],
)
def test_a_token_costs_what_sglang_sums_up(model: str, settings: dict[str, Any], per_token: float) -> None:
    assert sglang_pool(served(model, **settings)).per_token == pytest.approx(per_token)


@pytest.mark.parametrize(("requests", "slots"), [(None, 257), (64, 65), (256, 257)])
def test_slots_of_deepseek_v4_hold_a_ring_of_states_each(requests: int | None, slots: int) -> None:
    """128 states a slot, one ring and a row more, in whole blocks of 128; 4096 bytes a state, 20 layers."""
    pool = sglang_pool(served("deepseek-v4-flash", max_running_requests=requests))
    assert pool.fixed == (slots * 128 + 256) * 4096 * 20
    shared = served("deepseek-v4-flash", tp=8, dp=8, dp_attention=True, max_running_requests=64)
    assert sglang_pool(shared).fixed == (9 * 128 + 256) * 4096 * 20, "eight of them on each rank"


def test_an_eleventh_of_inklings_pool_is_states_of_convolutions() -> None:
    pool = sglang_pool(served("inkling-small"))
    assert pool.tokens_in(11_000_000_000) == 10_000_000_000 // 43_008
    # A limit of tokens does not bound them.
    assert pool.limited(1000, 11_000_000_000) == 1_000_000_000 + 1000 * 43_008
    plan = plan_memory(KNOWN["inkling-small-h200-32"].job)
    item = plan.phase("generate").item("key/value cache", "engine")
    assert item is not None
    assert plan.kv_tokens == plan.kv_tokens_least == 327_680
    assert item.num_bytes == pytest.approx(19.56e9 / 11 + 327_680 * 43_008 / 8, rel=2e-3)


def test_the_layers_of_a_stage_cost_their_share() -> None:
    whole, half = (sglang_pool(served("deepseek-v4-flash", pp=pp)) for pp in (1, 2))
    assert half.per_token == pytest.approx(whole.per_token / 2)
    assert half.fixed == whole.fixed // 2


@given(st.integers(1, 4096), st.integers(10, 300), st.sampled_from(["qwen3-4b", "deepseek-v4-flash", "inkling"]))
def test_the_tokens_that_a_pool_admits_fill_it(requests: int, gigabytes: int, model: str) -> None:
    pool, size = sglang_pool(served(model, max_running_requests=requests)), gigabytes * 10**9
    tokens = pool.tokens_in(size)
    assert tokens > 0 or size * pool.share < pool.fixed + pool.per_token
    if tokens:
        assert size - 2 * pool.per_token <= pool.limited(tokens, size) <= size
        assert pool.limited(tokens // 2, size) < size - pool.per_token * (tokens // 2 - 1)
    assert pool.tokens_in(pool.fixed - 1 if pool.fixed else 0) == 0


def test_only_sglang_has_such_a_pool() -> None:
    job = served("qwen3-4b")
    with pytest.raises(ValueError, match="no SGLang engine"):
        sglang_pool(replace(job, engine=EngineLayout(engine="vllm")))


def test_fp8_rows_of_a_sparse_model_are_larger_than_sglang_sums_up() -> None:
    """656 bytes a row are allocated where 576 are counted: rope in bf16 and four scales. Plain rows on ROCm."""
    cuda, rocm = (sglang_pool(served("glm-5_2", device, kv_cache_dtype="fp8")) for device in ("gb300", "mi355x"))
    assert cuda.beyond(1000) == 78 * 80 * 1000
    assert rocm.beyond(1000) == 0
    plan = plan_memory(KNOWN["glm-5_2-gb300-32-async"].job)
    beyond = plan.phase("generate").item("cache beyond its sums", "engine")
    assert beyond is not None
    assert beyond.num_bytes == pytest.approx(79 * 80 * (plan.kv_tokens or 0), rel=1e-6)


def test_the_one_buffer_cache_of_rocm_has_a_window_for_every_slot() -> None:
    """bf16 rows of 1024 bytes: rings of 257 slots in 43 layers, less what was counted for windows and fp8 rows."""
    unified = sglang_pool(served("deepseek-v4-flash", "mi355x", UNIFIED))
    assert unified.beyond(0) == 257 * 128 * 1024 * 43
    counted, taken = 2511.2 + 3157.25, 1024 * (21 / 4 + 20 / 128)
    assert unified.beyond(1_000_000) == pytest.approx(257 * 128 * 1024 * 43 - 1_000_000 * (counted - taken), abs=1)
    assert unified.beyond(100_000_000) == 0, "what is not used is not given back"
    for device, environment in (("h200", UNIFIED), ("mi355x", {"engine": {"SGLANG_HACK_FLASHMLA_BACKEND": "triton"}})):
        assert sglang_pool(served("deepseek-v4-flash", device, environment)).beyond(0) == 0


def test_slots_that_leave_no_room_are_an_error() -> None:
    job = KNOWN["deepseek-v4-flash-mi355x-32"].job
    assert job.engine is not None
    crowded = plan_memory(replace(job, engine=replace(job.engine, max_running_requests=2500)))
    assert crowded.kv_tokens == 0
    assert "holds 0 tokens" in next(f.message for f in crowded.findings if f.rule == "engine-cache")


def test_a_cache_by_fraction_is_known_less_well_than_the_sum_it_is_left_from() -> None:
    plan = plan_memory(served("qwen3-30b-a3b", memory_fraction=0.5))
    held = {item.name: item.num_bytes for item in plan.phase("generate").items}
    fewer = 0.08 * (held["weights"] + held["key/value cache"]) / 98_304
    assert plan.kv_tokens is not None
    assert plan.kv_tokens_least == pytest.approx(plan.kv_tokens - fewer, abs=1)
    given_bytes = plan_memory(served("qwen3-30b-a3b", kv_cache_bytes=10 << 30))
    assert given_bytes.kv_tokens_least == given_bytes.kv_tokens


@pytest.mark.parametrize(
    ("device", "settings", "reserved"),
    [
        ("h100", {}, 512 + 1.5 * 8192 + 2 * 256 + 128),
        ("h200", {"tp": 8}, 512 + 1.5 * 8192 + 2 * 512 + 128 * 8),
        ("mi355x", {"tp": 8}, 512 + 1.5 * 16_384 + 2 * 512 + 128 * 8),
        ("mi355x", {"tp": 8, "chunked_prefill_tokens": 2048, "cuda_graphs": False}, 10_240),
        (
            "h200",
            {"tp": 8, "dp": 8, "dp_attention": True, "moe_a2a": "deepep"},
            512 + 12_288 + 18_432 + 1024 * 2 + 2048,
        ),
    ],
)
def test_the_default_fraction_leaves_what_sglang_reserves(
    device: str, settings: dict[str, Any], reserved: float
) -> None:
    """MiB, by _handle_gpu_memory_settings: 512, 1.5 a token of a prefill, 2 a sequence of the largest graph, 128 a
    rank; under data-parallel attention 4.5 a sequence and rank, 2 GiB for DeepEP; 10 GiB at least."""
    job = served("qwen3-30b-a3b", device, **settings)
    memory = job.hardware.memory_bytes
    assert memory is not None
    assert default_fraction(job, memory) == round(1 - reserved * 2**20 / memory, 3)
    pool = plan_memory(job).phase("generate").item("key/value cache", "engine")
    assert pool is not None
    assert pool.basis == "assumed"


def test_a_cache_is_as_sure_as_what_it_is_counted_from() -> None:
    """A size in bytes and SGLang's stated fraction are counted; vLLM's leaves what assumed activations leave."""

    def basis(**engine: Any) -> str:
        job = served("qwen3-30b-a3b", gpus_per_engine=1)
        item = (
            plan_memory(replace(job, engine=EngineLayout(**engine))).phase("generate").item("key/value cache", "engine")
        )
        assert item is not None
        return item.basis

    assert basis(engine="vllm", kv_cache_bytes=10 << 30) == "counted"
    assert basis(engine="sglang", memory_fraction=0.7) == "counted"
    assert basis(engine="vllm", memory_fraction=0.7) == "assumed"
    assert basis(engine="sglang") == "assumed"
