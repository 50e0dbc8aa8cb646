"""Repairs of random jobs: what is advised works, and brings nothing that was not there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.topology.catalogue import hardware, hardware_names, model_names, model_shape
from lockstep.topology.layout import check_layout, is_legal
from lockstep.topology.records import (
    Batch,
    EngineLayout,
    Job,
    MegatronSwitches,
    TrainLayout,
    TrainMemory,
)
from lockstep.topology.repairs import describe, divisors, errors
from lockstep.topology.rules import apply, rule_named, setting
from lockstep.topology.rules_pipeline import balanced
from tests.unit.layout_planted import PLANTED, megatron

SIZE = st.sampled_from([1, 1, 1, 2, 3, 4, 5, 8, 16])
MAYBE = st.none() | st.integers(1, 40)
FLAG = st.booleans()

MODELS = st.sampled_from(model_names()).map(model_shape)
DEVICES = st.sampled_from([name for name in hardware_names() if name != "cpu"]).map(hardware)

SWITCHES = st.builds(
    MegatronSwitches,
    implementation=st.sampled_from([None, "upstream", "miles", "verl"]),
    rank_order=st.sampled_from(["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]),
    optimizer_instances=SIZE,
    layers_per_virtual_stage=st.none() | st.integers(1, 6),
    tp_comm_overlap=FLAG,
    moe_shared_expert_overlap=FLAG,
    moe_linear_bias=FLAG,
    ep_a2a_overlap=FLAG,
    hybrid_cp=FLAG,
    torch_fsdp2=FLAG,
)
TRAIN = st.builds(
    TrainLayout,
    backend=st.sampled_from(["megatron", "megatron", "fsdp"]),
    tp=SIZE,
    pp=SIZE,
    cp=SIZE,
    ep=SIZE,
    etp=st.none() | SIZE,
    replicate=st.none() | SIZE,
    virtual_stages=st.none() | st.integers(1, 4),
    first_stage_layers=MAYBE,
    last_stage_layers=MAYBE,
    account_for_loss=FLAG,
    sequence_parallel=FLAG,
    cp_comm_type=st.sampled_from([None, "p2p", "a2a", "allgather", "a2a+p2p"]),
    moe_dispatcher=st.sampled_from([None, "alltoall", "allgather", "deepep", "allreduce"]),
    switches=SWITCHES,
)
MEMORY = st.builds(
    TrainMemory,
    fp8=st.sampled_from(["none", "blockwise", "mxfp8", "delayed"]),
    fp8_param_gather=FLAG,
    moment_dtype=st.sampled_from(["fp32", "bf16"]),
    distributed_optimizer=FLAG,
    precision_aware_optimizer=FLAG,
    overlap_param_gather=FLAG,
    optimizer_offload_fraction=st.sampled_from([0.0, 0.75, 1.0]),
    offload_weights=FLAG,
    rematerialise_weights=FLAG,
    stream_optimizer=FLAG,
    recompute=st.sampled_from(["none", "selective", "full"]),
    recompute_method=st.sampled_from([None, "uniform"]),
)
ENGINE = st.builds(
    EngineLayout,
    engine=st.sampled_from(["torch", "vllm", "sglang"]),
    gpus_per_engine=SIZE,
    tp=SIZE,
    pp=st.sampled_from([1, 1, 2]),
    dp=SIZE,
    ep=SIZE,
    dp_attention=FLAG,
    moe_a2a=st.sampled_from([None, "deepep", "mori", "pplx", "flashinfer", "deepep_low_latency"]),
    quantisation=st.sampled_from(["none", "fp8", "mxfp4_experts"]),
    moe_dp=st.sampled_from([1, 1, 2]),
    moe_dense_tp=st.sampled_from([None, 1, 3]),
    prefill_cp=st.sampled_from([1, 1, 2]),
    decode_cp=st.sampled_from([1, 1, 3]),
    page_tokens=st.sampled_from([None, 64]),
    chunked_prefill_tokens=st.sampled_from([None, 1000, 8192, 65536]),
)
BATCH = st.builds(
    Batch,
    num_prompts=st.integers(1, 64),
    group_size=st.sampled_from([1, 4, 8]),
    optimizer_steps=st.integers(1, 4),
    global_batch=st.none() | st.integers(1, 256),
    micro_batch=st.none() | st.integers(1, 4),
    pad_multiple=st.none() | st.sampled_from([8, 64, 1000, 1024]),
)
JOBS = st.builds(
    Job,
    name=st.just("random"),
    model=MODELS,
    hardware=DEVICES,
    nodes=st.sampled_from([1, 1, 2, 4, 6]),
    gpus_per_node=st.sampled_from([1, 4, 8, 8, 16]),
    train=st.none() | TRAIN,
    memory=MEMORY,
    engine=st.none() | ENGINE,
    batch=st.none() | BATCH,
    colocated=FLAG,
    rollout_gpus=st.sampled_from([0, 4, 8]),
    fully_async=FLAG,
    indexer_replay=FLAG,
    routing_replay=FLAG,
)


@given(JOBS)
@settings(max_examples=120, deadline=None)
def test_an_advised_repair_ends_its_violation(job: Job) -> None:
    findings = check_layout(job)
    assert is_legal(job) == all(finding.severity != "error" for finding in findings)
    for finding in findings:
        assert bool(finding.repair) == bool(finding.changes)
        if finding.changes:
            assert rule_named(finding.rule).broken(apply(job, finding.changes)) is None, finding


@given(JOBS)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_repairing_again_and_again_ends(job: Job) -> None:
    """Following the first finding's advice leads, in as many turns as there are rules, to a job without errors or to
    one whose error says that no setting mends it."""
    for _ in range(60):
        wrong = [finding for finding in check_layout(job) if finding.severity == "error"]
        if not wrong:
            return
        if not wrong[0].changes:
            assert "no setting of its own mends this" in wrong[0].message
            return
        job = apply(job, wrong[0].changes)
    raise AssertionError(f"still {sorted(errors(job))} after 60 repairs")


def test_a_change_says_the_old_and_the_new_value() -> None:
    job = megatron(tp=2, etp=1, job={"environment": {"trainer": {"A": "1", "B": "2"}}})
    assert describe(job, [(("train.tp", 4),)]) == "tp 2 → 4"
    assert describe(job, [(("train.tp", 4),), (("train.tp", 8),)]) == "tp 2 → 4 or 8"
    assert describe(job, [(("train.tp", 4), ("train.etp", None))]) == "tp 2 → 4, etp 1 → unset"
    assert describe(job, [(("train.sequence_parallel", False),)]) == "sequence_parallel on → off"
    environment = {"trainer": {"A": "1", "C": "x=y"}}
    assert describe(job, [(("environment", environment),)]) == "trainer B 2 → unset, trainer C unset → x=y"


def test_changes_reach_any_depth_and_leave_the_job_alone() -> None:
    job = megatron(tp=2, etp=1)
    changed = apply(job, (("train.switches.hybrid_cp", True), ("nodes", 3)))
    assert setting(changed, "train.switches.hybrid_cp") is True
    assert changed.nodes == 3
    assert setting(job, "train.switches.hybrid_cp") is False


@given(st.lists(st.integers(-2, 9), min_size=1, max_size=8), st.integers(0, 40))
def test_stages_are_balanced_to_the_layers_that_there_are(counts: list[int], num_layers: int) -> None:
    stages = balanced(counts, num_layers)
    assert sum(stages) == num_layers
    assert len(stages) == len(counts)
    assert min(stages) >= 0


def test_advice_differs_from_what_is_there() -> None:
    for planted in PLANTED:
        for finding in check_layout(planted.job):
            assert all(setting(planted.job, path) != value for path, value in finding.changes), finding


def test_advice_has_the_types_of_the_settings() -> None:
    """The paths that rules change exist, and their new values have the settings' types."""
    for planted in PLANTED:
        for finding in check_layout(planted.job):
            for path, value in finding.changes:
                now: Any = setting(planted.job, path)
                kinds = {type(now), type(value)} - {type(None)}
                assert len(kinds) == 1, (path, now, value)


@given(st.integers(1, 3000))
def test_divisors_are_all_of_them(number: int) -> None:
    assert divisors(number) == tuple(part for part in range(1, number + 1) if number % part == 0)


def test_a_mistyped_number_of_nodes_is_judged_with_few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every count up to twice the present one was tried: five million nodes took minutes."""
    tried = 0

    def counted(*args: Any) -> Job:
        nonlocal tried
        tried += 1
        return apply(*args)

    monkeypatch.setattr("lockstep.topology.repairs.apply", counted)
    batch = Batch(num_prompts=32, group_size=8, global_batch=256)
    typo = replace(megatron(), nodes=1 << 22, batch=batch)
    found = {finding.rule: finding for finding in check_layout(typo)}
    assert found["batch-ranks"].repair
    assert check_layout(replace(typo, colocated=False, rollout_gpus=(1 << 24) + 1))
    assert tried < 100_000
