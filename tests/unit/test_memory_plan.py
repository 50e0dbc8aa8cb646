"""The memory plan against published layouts and numbers, and its laws: what ranks, offload and recomputation do."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.topology.catalogue import hardware, model_shape
from lockstep.topology.evidence import KnownLayout, known_layouts
from lockstep.topology.memory import MARGIN, NOT_MODELLED, compare_plans, plan_memory, plan_text
from lockstep.topology.memory_records import PHASES, MemoryPlan
from lockstep.topology.parameters import rank_parameters
from lockstep.topology.records import Batch, EngineLayout, Job, TrainLayout, TrainMemory
from lockstep.topology.rules import apply
from lockstep.topology.trainer_memory import ASSUMED_TOKENS, micro_batch_tokens

KNOWN = {known.name: known for known in known_layouts()}
BATCH = Batch(num_prompts=32, group_size=8, prompt_tokens=1024, response_tokens=3072, max_tokens_per_gpu=4096)

SIZES = [
    *("nodes", "gpus_per_node", "train.tp", "train.pp", "train.cp", "train.ep", "train.etp", "train.virtual_stages"),
    *("train.switches.layers_per_virtual_stage", "memory.recompute_num_layers", "batch.prompt_tokens"),
    *("batch.response_tokens", "batch.max_tokens_per_gpu", "batch.micro_batch", "batch.global_batch", "engine.tp"),
    *("engine.pp", "engine.dp", "engine.ep", "engine.gpus_per_engine", "model.num_layers", "model.hidden"),
    *("batch.optimizer_steps", "batch.group_size", "batch.logprob_chunk_tokens", "model.head_dim"),
]


def job_of(model: str, device: str, nodes: int, per_node: int, **more: Any) -> Job:
    """A Megatron job; settings of the layout by name, ``memory``, ``engine`` and ``batch`` whole."""
    whole = {
        name: more.pop(name) for name in ("memory", "engine", "batch", "colocated", "rollout_gpus") if name in more
    }
    layout = TrainLayout(backend="megatron", etp=1, sequence_parallel=True, **more)
    shape, kind = model_shape(model), hardware(device)
    return Job(name=model, model=shape, hardware=kind, nodes=nodes, gpus_per_node=per_node, train=layout, **whole)


def errors(plan: MemoryPlan) -> dict[str, Any]:
    return {finding.rule: finding for finding in plan.findings if finding.severity == "error"}


# --- static memory: DeepSeek-V4-Flash on three kinds of device --------------------------------------------------------


def offloaded(share: float) -> TrainMemory:
    return TrainMemory(optimizer_offload_fraction=share, precision_aware_optimizer=share > 0)


MI355X = {"tp": 4, "pp": 4, "ep": 8, "first_stage_layers": 11, "last_stage_layers": 10, "memory": offloaded(0.75)}
H200 = {"tp": 8, "pp": 8, "ep": 8, "first_stage_layers": 4, "last_stage_layers": 3}
H100 = {"pp": 8, "ep": 8, "stage_layers": (6, 6, 6, 5, 5, 5, 5, 5), "memory": offloaded(1.0)}


@pytest.mark.parametrize(
    ("device", "nodes", "layout", "stage", "gigabytes"),
    [
        ("mi355x", 4, MI355X, 0, (19.1, 38.2, 27.6, 84.8, 110)),
        ("mi355x", 4, MI355X, 3, (None, None, None, 77.3, None)),
        ("h200", 8, H200, 1, (10.1, 20.2, 60.5, 90.8, 0)),
        ("h200", 8, H200, 0, (None, None, None, 61.3, 0)),
        ("h200", 8, H200, 7, (None, None, None, 46.7, 0)),
        ("h100", 8, H100, 0, (None, None, 0, 37.3, 80)),
        ("h100", 8, H100, 1, (None, None, 0, 34.2, None)),
        ("h100", 8, H100, 7, (None, None, 0, 31.8, None)),
    ],
)
def test_static_memory_of_a_stage(
    device: str, nodes: int, layout: dict[str, Any], stage: int, gigabytes: tuple[float | None, ...]
) -> None:
    held = plan_memory(job_of("deepseek-v4-flash", device, nodes, 8, **layout)).stages[stage]
    planned = (held.weights, held.gradients, held.optimizer, held.total, held.host)
    for number, expected in zip(planned, gigabytes, strict=True):
        if expected is not None:
            assert number / 1e9 == pytest.approx(expected, abs=0.5 if expected >= 80 and expected % 1 == 0 else 0.06)


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.booleans(),
)
def test_optimizer_states_of_all_ranks_are_twelve_bytes_a_parameter(
    tp: int, pp: int, ep: int, share: float, precise: bool
) -> None:
    """Distributed states are held once over the data-parallel ranks: a naive count over the world."""
    memory = TrainMemory(optimizer_offload_fraction=share, precision_aware_optimizer=precise)
    job = job_of("qwen3-30b-a3b", "h200", 2, 8, tp=tp, pp=pp, ep=ep, memory=memory)
    plan = plan_memory(job)
    world, expected, width = 16, 0.0, 12 if share or not precise else 10
    for stage in plan.stages:
        ends = {"first_stage": stage.stage == 0, "last_stage": stage.stage == pp - 1}
        held = rank_parameters(job.model, job.train or TrainLayout(), stage.layers, **ends)
        # A parameter has its states once; a replicated one once for each tensor-parallel rank.
        expected += width * (held.dense * tp + held.experts * ep)
    on_devices = sum(stage.optimizer for stage in plan.stages) * world / pp
    assert on_devices == pytest.approx(expected * (1 - share), rel=1e-6, abs=1e4)
    in_hosts = sum(stage.host for stage in plan.stages) * world / pp
    assert in_hosts == pytest.approx(expected / width * 16 * share, rel=1e-6, abs=1e4)


def test_equal_plans_have_nothing_to_compare() -> None:
    plan = plan_memory(KNOWN["qwen3-30b-a3b-h200-4"].job)
    assert not [line for line in compare_plans(plan, plan).splitlines() if line.startswith("    ")]


# --- micro-batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"max_tokens_per_gpu": 8192}, 8192),
        ({"max_tokens_per_gpu": 1024}, 2048),  # a sample of 4096 goes alone, half of it on each of two ranks
        ({"max_tokens_per_gpu": 1024, "packing": False}, 2048),
        ({"max_tokens_per_gpu": 8192, "packing": False}, 2048),  # padded samples come one at a time: no budget
        ({"max_tokens_per_gpu": 8192, "packing": False, "micro_batch": 3}, 6144),
        ({"max_tokens_per_gpu": None}, 2048),
    ],
)
def test_a_micro_batch_is_planned_for_its_longest_sample(settings: dict[str, Any], tokens: int) -> None:
    """By first fit a sample above the budget is a micro-batch, and miles takes no budget with padded samples."""
    job = job_of("qwen3-30b-a3b", "h200", 1, 4, cp=2, batch=replace(BATCH, **settings))
    assert micro_batch_tokens(job) == (tokens, True)


def test_a_budget_alone_is_the_plan_where_no_length_is_known() -> None:
    batch = Batch(num_prompts=1, group_size=8, max_tokens_per_gpu=2048, packing=False)
    assert micro_batch_tokens(job_of("qwen3-30b-a3b", "h200", 1, 4, batch=batch)) == (2048, True)
    assert micro_batch_tokens(job_of("qwen3-30b-a3b", "h200", 1, 4)) == (ASSUMED_TOKENS, False)


# --- engines ----------------------------------------------------------------------------------------------------------


def served(engine: EngineLayout, **more: Any) -> Job:
    """An engine alone on an H200."""
    shape, kind = model_shape("qwen3-30b-a3b"), hardware("h200")
    job = Job(name="served", model=shape, hardware=kind, gpus_per_node=engine.gpus_per_engine, train=None)
    return replace(job, engine=engine, batch=BATCH, **more)


def test_a_fraction_means_the_card_to_vllm_and_what_is_free_to_sglang() -> None:
    total = hardware("h200").memory_bytes
    assert total is not None
    held: dict[str, dict[str, int]] = {}
    for name in ("vllm", "sglang"):
        plan = plan_memory(served(EngineLayout(engine=name, memory_fraction=0.5)))
        held[name] = {item.name: item.num_bytes for item in plan.phase("generate").items}
    assert sum(held["vllm"].values()) == math.ceil(total / 2)
    context = held["sglang"]["device context"]
    assert held["sglang"]["weights"] + held["sglang"]["key/value cache"] == round((total - context) / 2)


def test_vllm_refuses_to_start_beside_a_trainer_that_keeps_too_much() -> None:
    """gpu_memory_utilization counts the whole card, so what the trainer holds is taken from the engine."""
    engine = EngineLayout(engine="vllm", gpus_per_engine=4, tp=4, memory_fraction=0.8)
    job = job_of("qwen3-30b-a3b", "h200", 1, 8, ep=8, engine=engine, batch=BATCH)
    finding = errors(plan_memory(job))["engine-start"]
    assert "of which" in finding.message
    away = replace(job, memory=TrainMemory(offload_weights=True))
    assert "engine-start" not in errors(plan_memory(away))


def test_quantised_weights_are_smaller_by_their_format() -> None:
    def weights(form: Any) -> int:
        item = (
            plan_memory(served(EngineLayout(engine="vllm", quantisation=form)))
            .phase("generate")
            .item("weights", "engine")
        )
        assert item is not None
        return item.num_bytes

    experts = 48 * 603_979_776
    assert weights("none") == pytest.approx(2 * 30_532_122_624, rel=1e-3)
    assert weights("none") - weights("mxfp4_experts") == pytest.approx(experts * (2 - 0.5 - 1 / 32), rel=1e-6)
    linears = 48 * 2 * 2048 * (4096 + 512)
    assert weights("none") - weights("fp8") == pytest.approx((experts + linears) * (1 - 4 / 128**2), rel=1e-6)


def test_a_cache_that_cannot_hold_one_sequence_is_an_error() -> None:
    job = served(EngineLayout(engine="vllm", kv_cache_bytes=100 << 20))
    assert "1066 tokens, one sequence has 4096" in errors(plan_memory(job))["engine-cache"].message


def test_a_limit_of_tokens_bounds_the_cache() -> None:
    open_end = plan_memory(served(EngineLayout(engine="sglang", memory_fraction=0.7)))
    bounded = plan_memory(served(EngineLayout(engine="sglang", memory_fraction=0.7, max_total_tokens=10_000)))
    item = bounded.phase("generate").item("key/value cache", "engine")
    assert item is not None
    assert item.num_bytes == 10_000 * 98_304
    assert bounded.kv_tokens == 10_000
    assert (open_end.kv_tokens or 0) > 10_000


def test_sleep_on_rocm_keeps_the_states_of_compressors() -> None:
    """What the engine reports as freed is not: they lie outside of the memory saver. Rings of 257 slots in 20 layers,
    and 1344 bytes a token in the others."""
    job = KNOWN["deepseek-v4-flash-mi355x-32"].job
    plan = plan_memory(job)
    item = plan.phase("train").item("compressor states", "engine")
    assert item is not None
    assert item.num_bytes == pytest.approx(259 * 128 * 4096 * 20 + 1344 * (plan.kv_tokens or 0), rel=1e-6)
    limited = plan_memory(replace(job, engine=replace(job.engine or EngineLayout(), max_running_requests=63)))
    fewer = limited.phase("train").item("compressor states", "engine")
    assert fewer is not None
    assert fewer.num_bytes == pytest.approx(66 * 128 * 4096 * 20 + 1344 * (limited.kv_tokens or 0), rel=1e-6)
    elsewhere = replace(job, hardware=hardware("h200"))
    assert plan_memory(elsewhere).phase("train").item("compressor states", "engine") is None


# --- the plan as a whole ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", KNOWN.values(), ids=KNOWN)
def test_every_number_says_where_it_is_from(known: KnownLayout) -> None:
    plan = plan_memory(known.job)
    assert [phase.phase for phase in plan.phases if phase.devices != "engine"] == [
        phase for phase in PHASES if known.job.colocated or phase != "generate"
    ]
    for item in (item for phase in plan.phases for item in phase.items):
        assert item.num_bytes >= 0
        assert item.basis in ("counted", "measured", "assumed")
        assert item.note
    text = plan_text(plan)
    assert f"margin {MARGIN:.0%}" in text
    assert all(part in text for part in NOT_MODELLED)


def test_apart_each_side_has_its_own_devices() -> None:
    engine = EngineLayout(engine="sglang", gpus_per_engine=8, tp=8)
    job = job_of("qwen3-30b-a3b", "h200", 4, 8, ep=8, engine=engine, batch=BATCH, colocated=False, rollout_gpus=16)
    plan = plan_memory(job)
    assert [(phase.phase, phase.devices) for phase in plan.phases] == [
        ("generate", "engine"), ("score", "trainer"), ("train", "trainer"), ("refit", "engine"), ("refit", "trainer"),
        ("save", "trainer"),
    ]  # fmt: skip
    assert all(item.owner == phase.devices for phase in plan.phases for item in phase.items)


def test_offloading_moves_the_trainer_to_the_host_while_the_engine_generates() -> None:
    known = KNOWN["qwen3-30b-a3b-h200-4"].job
    here = plan_memory(replace(known, memory=replace(known.memory, offload_weights=False)))
    away = plan_memory(replace(known, memory=replace(known.memory, offload_weights=True)))
    assert here.phase("generate").item("gradients") is not None
    assert away.phase("generate").item("gradients") is None
    assert away.host_bytes - here.host_bytes == 4 * max(stage.total for stage in away.stages)
    assert away.phase("train") == here.phase("train")


def test_streamed_states_are_neither_on_the_device_nor_in_host_memory() -> None:
    job = job_of("inkling", "gb300", 16, 4, tp=4, pp=4, ep=16, last_stage_layers=15)
    streamed = plan_memory(replace(job, memory=TrainMemory(stream_optimizer=True, grad_dtype="bf16")))
    assert all(stage.optimizer == stage.host == 0 for stage in streamed.stages)
    assert streamed.phase("train").item("streamed optimizer states") is not None
    assert not errors(streamed)


def test_a_split_that_does_not_come_out_is_said_and_still_planned() -> None:
    plan = plan_memory(job_of("deepseek-v4-flash", "h200", 8, 8, pp=8, ep=8))
    assert "memory-split" in [finding.rule for finding in plan.findings if finding.severity == "warning"]
    assert sum(len(stage.layers) for stage in plan.stages) == 43


def test_within_the_margin_is_a_warning_and_beyond_the_card_an_error() -> None:
    job = job_of("qwen3-4b", "h200", 1, 8, batch=BATCH)
    peak = plan_memory(job).peak
    assert peak is not None

    def severity(memory_bytes: float) -> list[str]:
        small = replace(job, hardware=replace(job.hardware, memory_bytes=round(memory_bytes)))
        return [finding.severity for finding in plan_memory(small).findings]

    assert severity(peak.total_bytes * (1 + MARGIN) + 1) == []
    assert severity(peak.total_bytes) == ["warning"]
    # The communicators' measurement is of another layout: they may take less, so that it may fit after all.
    assert peak.least_bytes < peak.total_bytes
    assert severity(peak.total_bytes - 1) == ["warning"]
    assert severity(peak.least_bytes) == ["warning"]
    assert severity(peak.least_bytes - 1) == ["error"]


def test_a_cpu_has_no_limit_to_exceed() -> None:
    job = job_of("smollm2-135m", "cpu", 1, 1, batch=BATCH)
    own = replace(job, train=TrainLayout(backend="fsdp"), engine=EngineLayout(engine="torch"))
    plan = plan_memory(own)
    assert plan.capacity_bytes is None
    assert plan.findings == ()
    assert "unknown" in plan_text(plan)


@pytest.mark.parametrize(
    ("name", "label", "seen"),
    [("mi300x", 192, 206_141_652_992), ("mi325x", 256, 274_861_129_728), ("mi355x", 288, 309_220_868_096)],
)
def test_amds_gigabytes_are_two_to_the_thirtieth(name: str, label: int, seen: int) -> None:
    """What rocm-smi and PyTorch see (ROCm/legacy-rocm-build#4750): the label in 2^30 bytes, less 16 MiB."""
    assert hardware(name).memory_bytes == seen == (label << 30) - (16 << 20)


def test_what_was_measured_with_cuda_is_assumed_on_rocm() -> None:
    for known, basis in (("qwen3-30b-a3b-h200-4", "measured"), ("qwen3-30b-a3b-mi355x-4", "assumed")):
        train = plan_memory(KNOWN[known].job).phase("train")
        found = [train.item("device context"), train.item("device context", "engine"), train.item("communicators")]
        assert [item and item.basis for item in found] == [basis] * 3


def test_planning_needs_no_torch() -> None:
    code = "import sys, lockstep.topology.memory, lockstep.topology.shapes; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@given(st.sampled_from(SIZES), st.integers(-2, 0))
def test_sizes_that_are_none_are_an_error_and_never_an_exception(path: str, size: int) -> None:
    engine = EngineLayout(engine="sglang", gpus_per_engine=8, tp=8)
    memory = TrainMemory(recompute="full", recompute_method="uniform", recompute_num_layers=1)
    job = job_of("qwen3-30b-a3b", "h200", 1, 8, ep=8, engine=engine, batch=BATCH, memory=memory)
    plan = plan_memory(apply(job, ((path, size),)))
    if plan.phases:
        assert size == 0, "a number that may be left out"
        assert all(phase.total_bytes > 0 for phase in plan.phases)
    else:
        assert [finding.rule for finding in plan.findings] == ["memory-sizes"]
        assert f"{path} = {size}" in plan.findings[0].message
