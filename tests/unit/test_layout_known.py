"""Public layouts: rules pass those that ran, refuse the one that was wrong, and find them among the suggestions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.topology.catalogue import hardware, model_names, model_shape
from lockstep.topology.evidence import KnownLayout, find_evidence, known_layouts, memory_differences, refused_layouts
from lockstep.topology.layout import check_layout, is_legal
from lockstep.topology.memory import plan_memory
from lockstep.topology.records import TrainLayout
from lockstep.topology.rules import apply
from lockstep.topology.suggest import Suggestion, job_for, legal_layouts, suggest

KNOWN = [pytest.param(known, id=known.name) for known in known_layouts()]
WORLDS = (1, 2, 6, 7, 8, 12, 48, 64, 97, 512, 720, 4096)


def sizes(layout: TrainLayout) -> tuple[int | None, ...]:
    return layout.tp, layout.pp, layout.cp, layout.ep, layout.etp


@pytest.mark.parametrize("known", KNOWN)
def test_a_known_layout_breaks_no_rule(known: KnownLayout) -> None:
    assert [finding for finding in check_layout(known.job) if finding.severity != "note"] == []


@pytest.mark.parametrize("known", KNOWN)
def test_a_known_layout_says_where_it_ran(known: KnownLayout) -> None:
    evidence = known.evidence
    assert evidence.source
    assert evidence.date.startswith("2026-")
    assert evidence.metric
    assert known.verified or known.status or evidence.note
    assert known.hardware == known.job.hardware.name
    assert evidence.source in evidence.text()


def test_the_catalogue_covers_what_recipes_name() -> None:
    assert len({known.name for known in known_layouts()}) == len(known_layouts()) >= 15
    models = {known.model for known in known_layouts()}
    assert {"deepseek-v4-flash", "glm-5_2", "inkling", "inkling-small", "qwen3-30b-a3b"} <= models
    assert {known.hardware for known in known_layouts()} >= {"mi355x", "h200", "h100", "gb300"}


@pytest.mark.parametrize("refused", [pytest.param(one, id=one.name) for one in refused_layouts()])
def test_a_layout_that_was_wrong_is_refused_with_its_public_repair(refused: KnownLayout) -> None:
    wrong = [finding for finding in check_layout(refused.job) if finding.severity == "error"]
    assert [finding.rule for finding in wrong] == [refused.rule]
    assert refused.repair in wrong[0].repair


@pytest.mark.parametrize("known", KNOWN)
def test_evidence_is_found_for_the_layout_and_not_for_another(known: KnownLayout) -> None:
    found = find_evidence(known.job)
    assert found is not None
    assert (found.model, found.hardware) == (known.model, known.hardware)
    assert found.verified >= known.verified
    assert known.job.train is not None
    other = replace(known.job, train=replace(known.job.train, ep=known.job.train.ep * 2))
    assert find_evidence(other) is None
    assert find_evidence(replace(known.job, hardware=hardware("b200"))) is None


def test_batch_and_name_do_not_make_another_layout() -> None:
    known = known_layouts()[0]
    assert find_evidence(replace(known.job, batch=None, name="mine")) == known


@pytest.mark.parametrize(
    "changes",
    [
        (("train.first_stage_layers", 10), ("train.last_stage_layers", 11)),  # 43 = 10 + 11 + 11 + 11
        (("train.sequence_parallel", False),),
        (("nodes", 8), ("gpus_per_node", 4)),
        (("engine.dp_attention", True),),
    ],
)
def test_another_split_of_as_many_devices_is_another_layout(changes: tuple[tuple[str, object], ...]) -> None:
    assert find_evidence(apply(known_layouts()[0].job, changes)) is None


def test_a_split_written_in_another_way_is_the_same_layout() -> None:
    known = known_layouts()[0]
    assert known.job.train is not None
    ends = replace(known.job.train, first_stage_layers=None, last_stage_layers=None, stage_layers=(11, 11, 11, 10))
    assert find_evidence(replace(known.job, train=ends)) == known


@pytest.mark.parametrize("known", KNOWN)
def test_memory_settings_that_are_not_the_runs_are_listed(known: KnownLayout) -> None:
    assert memory_differences(known.job, known) == ()
    was = known.job.memory.optimizer_offload_fraction
    less = replace(known.job, memory=replace(known.job.memory, optimizer_offload_fraction=0.5))
    said = "" if "memory.optimizer_offload_fraction" in known.stated else " (not stated)"
    assert memory_differences(less, known) == (f"memory.optimizer_offload_fraction {was:g} → 0.5{said}",)
    assert find_evidence(less) == find_evidence(known.job)


# --- suggestions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", KNOWN)
def test_a_known_layout_is_among_the_legal_ones(known: KnownLayout) -> None:
    assert known.job.train is not None
    assert sizes(known.job.train) in {sizes(layout) for layout in legal_layouts(known.job)}


@pytest.mark.parametrize("model", model_names())
@pytest.mark.parametrize("world", WORLDS)
def test_suggestions_are_legal_and_ranked(model: str, world: int) -> None:
    job = job_for(model_shape(model), hardware("h200"), world)
    assert job.num_gpus == world
    found = suggest(job, limit=5)
    assert found
    assert len({one.layout for one in found}) == len(found) <= 5
    assert [one.fits for one in found] == sorted((one.fits for one in found), reverse=True)
    for one in found:
        assert is_legal(one.job)
        assert one.layout == one.job.train
        assert one.plan == plan_memory(one.job)
    too_large = [one.peak_bytes for one in found if one.fits == 0]
    assert too_large == sorted(too_large)


def test_the_legal_layouts_are_those_that_a_search_finds() -> None:
    """Every combination of sizes of 8 devices, asked of the rules one by one."""
    job = job_for(model_shape("qwen3-30b-a3b"), hardware("h200"), 8)
    assert job.train is not None
    found = {sizes(layout) for layout in legal_layouts(job)}
    searched: set[tuple[int | None, ...]] = set()
    steps = (1, 2, 4, 8)
    for tp in steps:
        for pp in steps:
            for cp in steps:
                for ep in steps:
                    for etp in {1, tp}:
                        layout = replace(job.train, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, sequence_parallel=tp > 1)
                        if is_legal(replace(job, train=layout)):
                            searched.add(sizes(layout))
    assert found == searched


def best(model: str, device: str, world: int) -> Suggestion:
    return suggest(job_for(model_shape(model), hardware(device), world), limit=1)[0]


def test_what_fits_comes_first_and_what_does_not_is_shown_all_the_same() -> None:
    assert best("qwen3-30b-a3b", "h200", 8).fits == 2
    small = best("glm-5_2", "h100", 8)
    assert small.fits == 0
    assert "does not fit" in small.text()


def test_a_model_that_fits_one_device_is_not_split() -> None:
    layout = best("qwen3-0_6b", "h200", 8).layout
    assert (layout.tp, layout.pp, layout.cp) == (1, 1, 1)


def test_suggestions_name_the_public_run_that_they_repeat() -> None:
    known = next(one for one in known_layouts() if one.name == "qwen3-30b-a3b-h200-4")
    every = suggest(replace(known.job, memory=known.job.memory), limit=100)
    assert known.name in {one.known.name for one in every if one.known}


def test_the_batch_decides_about_data_parallelism() -> None:
    known = known_layouts()[0]
    assert known.job.batch is not None
    one = replace(known.job, batch=replace(known.job.batch, num_prompts=1, group_size=1, global_batch=1))
    found = list(legal_layouts(one))
    assert found
    assert {32 // (layout.tp * layout.pp * layout.cp) for layout in found} == {1}


def test_fsdp_is_offered_its_own_axes() -> None:
    job = job_for(model_shape("qwen3-4b"), hardware("h200"), 8, backend="fsdp")
    found = suggest(job)
    assert {one.layout.replicate for one in found} == {None, 2, 4, 8}
    assert all(one.layout.backend == "fsdp" for one in found)


def test_no_legal_layout_gives_no_suggestion() -> None:
    job = job_for(model_shape("qwen3-4b"), hardware("h200"), 4)
    assert suggest(replace(job, indexer_replay=True)) == []
