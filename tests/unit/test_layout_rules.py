"""Each layout rule finds its planted violation, says it in numbers and mends it; legal jobs break none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.topology.layout import check_layout, is_legal
from lockstep.topology.records import EngineLayout, Finding, Job
from lockstep.topology.repairs import errors
from lockstep.topology.rules import RULES, apply, rule_named
from tests.unit.layout_planted import (
    DENSE,
    FULL,
    GLM,
    MOE,
    PLANTED,
    V4,
    Planted,
    fsdp,
    megatron,
    serving,
    shape,
    together,
)


def ids(findings: list[Finding]) -> list[str]:
    return [finding.rule for finding in findings]


def complaints(job: Job) -> list[str]:
    """Errors and warnings."""
    return [finding.rule for finding in check_layout(job) if finding.severity != "note"]


def only(job: Job, rule: str) -> Finding:
    found = [finding for finding in check_layout(job) if finding.rule == rule]
    assert len(found) == 1, ids(check_layout(job))
    return found[0]


def test_every_rule_has_a_text_a_source_and_a_planted_violation() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES) > 100
    assert [rule.id for rule in RULES if not rule.text.endswith(".") or not rule.source] == []
    assert {rule.id for rule in RULES} == {planted.rule for planted in PLANTED}


@pytest.mark.parametrize("planted", PLANTED, ids=[planted.rule for planted in PLANTED])
def test_a_planted_violation_is_found_alone_and_mended(planted: Planted) -> None:
    found = [one for one in check_layout(planted.job) if one.severity != "note" or one.rule == planted.rule]
    assert set(ids(found)) == {planted.rule, *planted.also}
    finding = only(planted.job, planted.rule)
    assert finding.message
    assert finding.source
    assert finding.repair == planted.repair
    if finding.changes:
        mended = apply(planted.job, finding.changes)
        assert rule_named(planted.rule).broken(mended) is None
        assert errors(mended) <= errors(planted.job) - {planted.rule}


@pytest.mark.parametrize("planted", PLANTED, ids=[planted.rule for planted in PLANTED])
def test_errors_and_only_errors_make_a_layout_illegal(planted: Planted) -> None:
    severities = {finding.severity for finding in check_layout(planted.job)}
    assert is_legal(planted.job) == ("error" not in severities)


# --- all at once, the most fundamental first --------------------------------------------------------------------------


def test_all_violations_come_at_once_with_their_numbers() -> None:
    job = megatron(V4, 32, tp=16, pp=4, ep=48, etp=1, sequence_parallel=False)
    found = [finding for finding in check_layout(job) if finding.severity == "error"]
    assert ids(found) == [
        "dense-grid",
        "expert-grid",
        "output-groups-tp",
        "experts-ep",
        "sequence-parallel-moe",
        "pipeline-even",
    ]
    messages = " ".join(finding.message for finding in found)
    for number in ("16 · pp 4 · cp 1 = 64", "world 32", "etp 1 · ep 48 · pp 4 = 192", "256 experts", "43 layers"):
        assert number in messages


def test_errors_come_before_warnings_and_notes() -> None:
    order = {"error": 0, "warning": 1, "note": 2}
    for planted in PLANTED:
        ranks = [order[finding.severity] for finding in check_layout(planted.job)]
        assert ranks == sorted(ranks)


def test_a_size_of_zero_hides_no_other_violation() -> None:
    found = check_layout(megatron(DENSE, tp=0, pp=5, ep=2))
    assert ids(found)[0] == "sizes-positive"
    assert {"dense-grid", "no-experts", "pipeline-even"} <= set(ids(found))


def test_the_public_case_of_an_expert_grid_that_does_not_fit_is_repaired() -> None:
    """radixark/miles#2347, review: GLM-4.7-Flash on four devices."""
    finding = only(megatron("glm-4_7-flash", 4, "mi355x", tp=2, pp=2, ep=4, etp=1, last_stage_layers=23), "expert-grid")
    assert finding.message == "etp 1 · ep 4 · pp 2 = 8 does not divide world 4"
    assert finding.repair.startswith("ep 4 → 2")
    assert finding.changes == (("train.ep", 2),)


# --- faults that others had -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "planted",
    [one for one in PLANTED if "moe" in rule_named(one.rule).needs],
    ids=[one.rule for one in PLANTED if "moe" in rule_named(one.rule).needs],
)
def test_a_rule_of_mixtures_of_experts_fires_on_them_only(planted: Planted) -> None:
    """D8, https://github.com/ROCm/Megatron-LM/pull/85: a dense model was refused for a MoE rule."""
    assert planted.rule in ids(check_layout(planted.job))
    dense = replace(
        planted.job.model, num_experts=0, experts_per_token=0, num_shared_experts=0, moe_ffn=0, dense_layers=0
    )
    dense = replace(dense, ffn=dense.ffn or 6144, router_score=None)
    assert planted.rule not in ids(check_layout(replace(planted.job, model=dense)))


def test_a_dense_model_trains_with_tp_and_without_sequence_parallelism() -> None:
    """D8, the reported case."""
    assert complaints(megatron(DENSE, tp=2, sequence_parallel=False)) == []
    assert ids(check_layout(megatron(MOE, tp=2, etp=1, sequence_parallel=False)))[0] == "sequence-parallel-moe"


def test_expert_parallelism_is_held_against_ranks_and_experts() -> None:
    """D9, https://github.com/pytorch/torchtitan/pull/4258: only the dense product was checked."""
    ranks, experts = only(megatron(ep=16, etp=1), "expert-grid"), only(megatron(gpus=24, ep=3, etp=1), "experts-ep")
    assert "16" in ranks.message
    assert "world 8" in ranks.message
    assert "128 experts do not divide by ep 3" in experts.message
    sharded = only(fsdp(MOE, gpus=8, replicate=4, ep=4), "fsdp-experts")
    assert "ep 4" in sharded.message
    assert "2 ranks" in sharded.message


def test_the_violation_that_no_setting_can_pass_comes_first_with_what_can() -> None:
    """D10, https://github.com/vllm-project/vllm/issues/52435: tp 3 with 64 heads and 256 experts was told to change
    its experts, which would have failed on the heads."""
    job = serving("vllm", V4, gpus=24, tp=3, ep=3, gpus_per_engine=3)
    first, *_ = check_layout(job)
    assert first.rule == "engine-heads"
    assert "64 attention heads" in first.message
    for finding in check_layout(job):
        changed = apply(job, finding.changes)
        assert changed.engine is not None
        assert changed.engine.tp != 3
        assert is_legal(changed)


def test_a_setting_of_which_no_value_passes_is_named_and_another_is_changed() -> None:
    """D10: world 2 with pp 4 has no ep that fits."""
    finding = only(megatron(gpus=2, pp=4, etp=1), "expert-grid")
    assert finding.repair == "no value of ep or etp passes; pp 4 → 2 or 1"


def test_a_request_that_no_node_can_meet_is_refused_at_once() -> None:
    """D16, https://github.com/allenai/open-instruct/issues/1431: a placement that could never be met was waited for."""
    wide = replace(megatron(DENSE), nodes=1, gpus_per_node=16)
    assert "16 devices a node, but a node of h200 has 8" in only(wide, "node-devices").message
    assert "2 devices do not divide into engines of 4" in only(together(gpus=2), "engine-pool").message
    nothing_left = together(job={"colocated": False, "rollout_gpus": 8})
    assert "8 of 8 devices are the engines' and 0 the trainer's" in only(nothing_left, "rollout-share").message


def test_a_batch_that_ranks_cannot_share_is_refused_with_both_numbers() -> None:
    """D7, https://github.com/verl-project/verl/issues/473: found minutes into the run."""
    few = only(megatron(DENSE, 2, batch={"num_prompts": 1, "group_size": 1}), "batch-ranks")
    assert "1 samples a step for 2 data-parallel ranks" in few.message
    uneven = only(megatron(DENSE, 10, batch={"num_prompts": 12, "group_size": 8, "micro_batch": 1}), "batch-split")
    assert "96 samples" in uneven.message
    assert "dp 10" in uneven.message
    assert "dp 8 or 12 would" in uneven.message


def test_several_steps_a_batch_add_to_a_staleness_bound() -> None:
    """D12, https://github.com/radixark/miles/pull/2524: the bound covered the drained batch only."""
    job = megatron(DENSE, batch={"optimizer_steps": 4}, job={"max_staleness": 2})
    finding = only(job, "staleness-steps")
    assert finding.severity == "warning"
    assert "5 versions behind" in finding.message
    assert is_legal(job)
    assert complaints(megatron(DENSE, batch={"optimizer_steps": 1}, job={"max_staleness": 2})) == []
    assert complaints(megatron(DENSE, batch={"optimizer_steps": 4})) == []


SPELLINGS = {
    "etp": (megatron(gpus=4, tp=2, ep=4), megatron(gpus=4, tp=2, ep=4, etp=2), "expert-grid"),
    "virtual stages": (
        megatron(DENSE, pp=2, virtual_stages=4),
        megatron(DENSE, pp=2, switches={"layers_per_virtual_stage": 4}),
        "pipeline-even",
    ),
    "global batch": (
        megatron(DENSE, batch={"num_prompts": 1, "group_size": 4}),
        megatron(DENSE, batch={"num_prompts": 1, "group_size": 4, "global_batch": 4}),
        "batch-ranks",
    ),
    "flex back end": (
        megatron(moe_dispatcher="deepep"),
        megatron(moe_dispatcher="flex", switches={"moe_flex_backend": "deepep"}),
        "dispatcher-ranks",
    ),
    "stages": (
        megatron(GLM, pp=2, first_stage_layers=39),
        megatron(GLM, pp=2, stage_layers=(39, 39)),
        "indexer-stage-start",
    ),
    "layout string": (
        megatron(GLM, pp=2, first_stage_layers=39),
        megatron(GLM, pp=2, switches={"pipeline_layout": "Et*39|t*39L"}),
        "indexer-stage-start",
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_setting_in_another_form_is_judged_alike(name: str) -> None:
    """D6, https://github.com/verl-project/verl/pull/833: a check ran for one spelling of a setting only."""
    one, other, rule = SPELLINGS[name]
    assert only(one, rule).severity == only(other, rule).severity == "error"


def test_custom_all_reduce_is_refused_only_where_memory_is_paused_on_rocm() -> None:
    """I3, https://github.com/ROCm/aiter/issues/2061."""
    engine = {"custom_all_reduce": True}
    assert "paused-all-reduce" in ids(check_layout(together(device="mi355x", engine=engine)))
    for harmless in (
        together(device="h200", engine=engine),
        together(device="mi355x", engine={**engine, "cuda_graphs": False}),
        together(device="mi355x", engine=engine, job={"colocated": False, "rollout_gpus": 4}),
    ):
        assert "paused-all-reduce" not in ids(check_layout(harmless))


@pytest.mark.parametrize("name", ["PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_under_tensor_parallelism_on_rocm(name: str) -> None:
    """I4, https://github.com/ROCm/aiter/issues/4174."""
    environment = {"engine": {name: "max_split_size_mb:512,expandable_segments:True"}}
    refused = serving("sglang", tp=8, device="mi355x", job={"environment": environment})
    assert name in only(refused, "expandable-segments").repair
    assert complaints(replace(refused, hardware=serving("sglang", tp=8).hardware)) == []
    alone = replace(refused, engine=EngineLayout(engine="sglang", gpus_per_engine=1))
    assert complaints(alone) == []


def test_an_fp8_cache_is_warned_of_only_where_it_was_misread() -> None:
    """I9, https://github.com/vllm-project/vllm/issues/45562: sparse attention, vLLM, and a device whose fp8 is fnuz."""
    fp8 = {"tp": 8, "ep": 8, "kv_cache_dtype": "fp8"}
    assert complaints(serving("vllm", GLM, device="mi325x", **fp8)) == ["rocm-fp8-cache"]
    for harmless in (
        serving("vllm", GLM, device="mi355x", **fp8),
        serving("vllm", GLM, device="h200", **fp8),
        serving("vllm", V4, device="mi300x", **fp8),  # which has no other cache
        serving("vllm", MOE, device="mi300x", tp=4, gpus=4, kv_cache_dtype="fp8"),
        serving("sglang", GLM, device="mi300x", **fp8),
    ):
        assert "rocm-fp8-cache" not in complaints(harmless)


# --- single rules, where more than one case matters -------------------------------------------------------------------


def test_engine_experts_of_quantised_blocks() -> None:
    """Shards that both engines refuse, and the ones that pass."""
    for width, tp, passes in ((768, 2, True), (768, 4, False), (1536, 4, True), (1536, 8, False), (2048, 16, True)):
        wide = shape(MOE, moe_ffn=width, num_kv_heads=32)
        job = serving("sglang", wide, gpus=tp, tp=tp, quantisation="fp8", device="gb300" if tp > 8 else "h200")
        assert ("engine-fp8-blocks" not in ids(check_layout(replace(job, nodes=1)))) == passes, (width, tp)


def test_vllm_without_expert_parallelism_spreads_an_expert_over_data_parallel_ranks() -> None:
    assert "engine-fp8-blocks" in ids(check_layout(serving("vllm", gpus=8, dp=8, quantisation="fp8")))
    assert complaints(serving("vllm", gpus=8, dp=8, ep=8, quantisation="fp8")) == []


def test_dp_attention_decides_how_many_ranks_share_heads() -> None:
    model = shape("glm-4_7-flash", moe_ffn=2048)
    assert "engine-heads" in ids(check_layout(serving("sglang", model, tp=8)))
    assert complaints(serving("sglang", model, tp=8, dp=2, dp_attention=True)) == []


def test_a_silent_change_of_expert_parallelism_is_judged_as_what_it_becomes() -> None:
    """SGLang's deepep makes ep 4 from ep 1, so experts of 768 are whole and fp8 blocks fit."""
    findings = check_layout(serving("sglang", gpus=4, tp=4, moe_a2a="deepep", quantisation="fp8"))
    assert ids(findings) == ["sglang-a2a-ep"]


def test_moris_chunk_is_what_its_variable_says() -> None:
    job = serving("sglang", device="mi355x", tp=8, ep=8, moe_a2a="mori", chunked_prefill_tokens=8192)
    assert complaints(job) == ["sglang-mori-chunk"]
    for value, found in (("16384", []), ("2048", ["sglang-mori-chunk"]), ("many", ["sglang-mori-chunk"])):
        environment = {"engine": {"SGLANG_MORI_NUM_MAX_DISPATCH_TOKENS_PER_RANK": value}}
        assert complaints(replace(job, environment=environment)) == found


def test_pipeline_groups_differ_on_dense_models_too() -> None:
    """Megatron builds the experts' grid for every model: with cp, its data-parallel size is another."""
    job = megatron(DENSE, pp=2, cp=2, switches={"rank_order": "tp-cp-ep-pp-dp"})
    assert complaints(job) == ["pipeline-groups"]


def test_connections_are_judged_only_where_the_environment_is_stated() -> None:
    assert complaints(megatron(DENSE, tp=4)) == []
    one = {"environment": {"trainer": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}}
    assert complaints(megatron(DENSE, tp=4, job=one)) == []
    assert complaints(megatron(DENSE, 4, "gb300", tp=4, job={"environment": {"trainer": {}}})) == []
    fsdp_inside = megatron(DENSE, switches={"megatron_fsdp": True}, job=one)
    assert "refuses" in only(fsdp_inside, "device-connections").message


def test_offload_combinations_that_exclude_each_other() -> None:
    good = {"offload_weights": True, "optimizer_offload_fraction": 1.0, "precision_aware_optimizer": True, **FULL}
    base = together(memory={**good, "rematerialise_weights": True})
    assert complaints(base) == []
    for name, value, obstacle in (
        ("offload_weights", False, "offload_weights off"),
        ("offload_target", "disk", "offload_target disk"),
        ("optimizer_offload_fraction", 0.0, "precision_aware_optimizer on the device"),
    ):
        job = replace(base, memory=replace(base.memory, **{name: value}))
        assert obstacle in only(job, "rematerialised-weights").message


def test_the_layers_of_length_multiples() -> None:
    """Padding for zigzag halves, sequence parallelism, DeepSeek-V4's blocks and fp8."""
    cases = [
        (megatron(DENSE, tp=4, cp=2, batch={"pad_multiple": 4112}), True),
        (megatron(DENSE, tp=4, cp=2, batch={"pad_multiple": 4100}), False),
        (megatron(V4, cp=2, cp_partition="contiguous", batch={"pad_multiple": 2304 * 2}), True),
        (megatron(V4, cp=2, cp_partition="contiguous", batch={"pad_multiple": 2176 * 2}), False),
        (megatron(DENSE, tp=2, memory={"fp8": "blockwise"}, batch={"pad_multiple": 128}), False),
        (megatron(DENSE, tp=2, memory={"fp8": "blockwise"}, batch={"pad_multiple": 256}), True),
    ]
    for job, passes in cases:
        assert ("sequence-multiple" not in ids(check_layout(job))) == passes, job.train


def test_packing_several_samples_is_refused_in_megatrons_own_loop_only() -> None:
    """miles and verl concatenate the samples of a micro-batch (miles get_batch; verl preprocess_packed_seqs)."""
    for implementation, refused in (("upstream", True), (None, True), ("miles", False), ("verl", False)):
        job = megatron(DENSE, batch={"micro_batch": 2}, switches={"implementation": implementation})
        assert ("packing-micro-batch" in ids(check_layout(job))) is refused


def test_four_bit_integers_have_no_blocks_of_fp8() -> None:
    """A width of 768 / 4 = 192 is no whole number of blocks of 128."""
    for quantisation, refused in (("fp8", True), ("int4", False), ("none", False)):
        wide = shape(MOE, moe_ffn=768, num_kv_heads=32)
        job = serving("sglang", wide, gpus=4, tp=4, quantisation=quantisation)
        assert ("engine-fp8-blocks" in ids(check_layout(job))) is refused


@pytest.mark.parametrize(
    ("job", "width"),
    [
        (megatron("smollm2-135m", 1, memory={"fp8": "blockwise"}), "hidden 576 = 576"),
        (megatron("glm-4_7-flash", 4, tp=4, etp=1, memory={"fp8": "blockwise"}), "key and value heads / tp 4 = 2240"),
        (megatron(shape(DENSE, head_dim=32), 8, tp=8, memory={"fp8": "blockwise"}), "query, key and value heads"),
    ],
)
def test_fp8_blocks_are_held_against_attention_and_the_hidden_width(job: Job, width: str) -> None:
    """Experts and MLPs alone were: a width of attention that is no multiple of 128 passed."""
    assert width in only(job, "fp8-blocks").message


def test_fp8_blocks_of_the_engine_are_held_against_attention() -> None:
    """vLLM's validate_fp8_block_shape checks each part of the fused projection: 8 heads of 64 at tp 8 leave 64."""
    narrow = shape(DENSE, head_dim=64, ffn=9216)
    assert (
        "key/value heads 512 / 8 = 64"
        in only(serving("vllm", narrow, tp=8, quantisation="fp8"), "engine-fp8-blocks").message
    )
    assert "engine-fp8-blocks" not in complaints(serving("vllm", narrow, gpus=4, tp=4, quantisation="fp8"))
    replicated = shape(DENSE, num_kv_heads=4, ffn=9216)  # a head of 128 lies whole on two ranks
    assert "engine-fp8-blocks" not in complaints(serving("vllm", replicated, tp=8, quantisation="fp8"))
