"""Pipeline splits: every way of writing one, against naive enumerations."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.topology.catalogue import model_shape
from lockstep.topology.layout import check_layout
from lockstep.topology.pipeline import (
    SplitError,
    parse_layout,
    split_layers,
    splits,
    stage_chunks,
    stage_counts,
    virtual_stages,
)
from lockstep.topology.records import MegatronSwitches, TrainLayout
from lockstep.topology.rules_pipeline import allowed_starts
from tests.unit.layout_planted import DENSE, GLM, V4, megatron, shape


def counts_of(num_layers: int, **layout: object) -> list[int]:
    return [len(layers) for layers in split_layers(num_layers, TrainLayout(**layout))]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_layers", "layout", "expected"),
    [
        (48, {"pp": 4}, [12, 12, 12, 12]),
        (43, {"pp": 4, "first_stage_layers": 11, "last_stage_layers": 10}, [11, 11, 11, 10]),
        (43, {"pp": 8, "first_stage_layers": 4, "last_stage_layers": 3}, [4, 6, 6, 6, 6, 6, 6, 3]),
        (66, {"pp": 4, "last_stage_layers": 15}, [17, 17, 17, 15]),
        (42, {"pp": 8, "last_stage_layers": 7}, [5] * 7 + [7]),
        (78, {"pp": 4, "first_stage_layers": 18, "last_stage_layers": 20}, [18, 20, 20, 20]),
        (43, {"pp": 4, "account_for_loss": True}, [11, 11, 11, 10]),
        (42, {"pp": 4, "account_for_loss": True, "account_for_embedding": True}, [10, 11, 11, 10]),
        (43, {"pp": 8, "stage_layers": (6, 6, 6, 5, 5, 5, 5, 5)}, [6, 6, 6, 5, 5, 5, 5, 5]),
        (2, {"pp": 2, "first_stage_layers": 1, "last_stage_layers": 1}, [1, 1]),
        (30, {}, [30]),
    ],
)
def test_known_splits(num_layers: int, layout: dict[str, object], expected: list[int]) -> None:
    assert counts_of(num_layers, **layout) == expected


@pytest.mark.parametrize(
    ("num_layers", "layout", "said"),
    [
        (43, {"pp": 4}, "43 layers do not divide by 4"),
        (48, {"pp": 4, "virtual_stages": 5}, "48 layers do not divide by 20"),
        (42, {"pp": 8, "first_stage_layers": 5, "last_stage_layers": 5}, "32 remaining layers do not divide by 6"),
        (10, {"pp": 2, "first_stage_layers": 4, "last_stage_layers": 5}, "1 layers remain for 0 stages"),
        (10, {"pp": 3, "first_stage_layers": 5, "last_stage_layers": 5}, "0 layers remain for 1 stages"),
        (10, {"pp": 2, "first_stage_layers": 0}, "at least 1"),
        (10, {"pp": 1, "first_stage_layers": 5, "last_stage_layers": 5}, "2 end stages are given, but pp is 1"),
        (36, {"pp": 2, "virtual_stages": 2, "first_stage_layers": 17}, "17 layers of a rank do not divide by 2"),
        (43, {"pp": 4, "account_for_embedding": True, "account_for_loss": True}, "45 layers with embedding and loss"),
        (43, {"pp": 4, "stage_layers": (20, 23)}, "2 stages are given for 4"),
        (43, {"pp": 2, "stage_layers": (20, 20)}, "the stages hold 40 layers of 43"),
    ],
)
def test_a_split_that_does_not_come_out_says_why(num_layers: int, layout: dict[str, object], said: str) -> None:
    with pytest.raises(SplitError, match=said):
        counts_of(num_layers, **layout)


def naive_uneven(num_layers: int, pp: int, virtual: int, first: int | None, last: int | None) -> list[int] | None:
    """Megatron's uneven split, found by trying every size of the stages between."""
    for middle in range(num_layers + 1):
        ranks = [middle] * pp
        if first is not None:
            ranks[0] = first
        if last is not None:
            ranks[-1] = last
        given = (first is not None) + (last is not None)
        between = pp > given
        if sum(ranks) == num_layers and all(held % virtual == 0 for held in ranks) and (middle > 0 or not between):
            return ranks
    return None


END = st.none() | st.integers(1, 20)


@given(st.integers(1, 60), st.integers(2, 9), st.integers(1, 3), END, END)
@settings(max_examples=400, deadline=None)
def test_uneven_splits_are_those_of_a_search(
    num_layers: int, pp: int, virtual: int, first: int | None, last: int | None
) -> None:
    layout = TrainLayout(pp=pp, virtual_stages=virtual, first_stage_layers=first, last_stage_layers=last)
    try:
        found = [len(layers) for layers in split_layers(num_layers, layout)]
    except SplitError:
        found = None
    assert found == naive_uneven(num_layers, pp, virtual, first, last)


@given(st.integers(1, 8), st.integers(1, 4), st.data())
@settings(max_examples=150, deadline=None)
def test_every_layer_lies_on_one_stage_and_chunks_go_round_the_ranks(
    pp: int, virtual: int, data: st.DataObject
) -> None:
    stages = data.draw(st.lists(st.integers(0, 5), min_size=pp * virtual, max_size=pp * virtual))
    num_layers = sum(stages)
    layout = TrainLayout(pp=pp, virtual_stages=virtual, stage_layers=tuple(stages))
    chunks = stage_chunks(num_layers, layout)
    assert len(chunks) == pp
    in_stage_order = [chunks[stage % pp][stage // pp] for stage in range(pp * virtual)]
    assert [len(chunk) for chunk in in_stage_order] == stages
    assert list(itertools.chain(*in_stage_order)) == list(range(num_layers))
    for rank, layers in enumerate(split_layers(num_layers, layout)):
        assert layers == tuple(itertools.chain(*chunks[rank]))


# --- layout strings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "decoder"),
    [
        ("Et*6|t*6|t*6|t*5|t*5|t*5|t*5|t*5L", (6, 6, 6, 5, 5, 5, 5, 5)),
        ("Et*3|(tt|)*29,m|L", (3, *(2,) * 29, 0, 0)),
        ("E|(t|)*4L", (0, 1, 1, 1, 1, 0)),
        ("Ett|tt,L", (2, 2)),
    ],
)
def test_layout_strings_are_read(text: str, decoder: tuple[int, ...]) -> None:
    assert parse_layout(text).decoder == decoder


def test_a_layout_string_with_other_letters_is_refused() -> None:
    with pytest.raises(SplitError, match="x, z"):
        parse_layout("Etx|tzL")


@given(st.lists(st.integers(0, 7), min_size=1, max_size=12).filter(sum))
def test_a_layout_string_means_the_same_as_its_stages(stages: list[int]) -> None:
    text = "E" + "|".join("t" * held for held in stages) + "L"
    num_layers = sum(stages)
    as_text = TrainLayout(pp=len(stages), switches=MegatronSwitches(pipeline_layout=text))
    as_stages = TrainLayout(pp=len(stages), stage_layers=tuple(stages))
    assert stage_counts(num_layers, as_text) == stage_counts(num_layers, as_stages)
    model = shape(DENSE, num_layers=num_layers)
    found = check_layout(megatron(model, gpus=len(stages), pp=len(stages), switches={"pipeline_layout": text}))
    assert [finding.rule for finding in found if finding.severity == "error"] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("t*20|Et*23L", "embedding E comes once, first"),
        ("Et*20|Et*23L", "embedding E comes once, first"),
        ("Et*20L|t*23", "loss L comes once, last"),
        ("Et*20|mt*22|t|L", "after every decoder layer"),
        ("Et*20|t*22", "hold 42 layers of 43"),
        ("Et*20|t*22|tL", "3 stages of the layout string do not divide by 2"),
    ],
)
def test_elements_out_of_place_are_found(text: str, said: str) -> None:
    job = megatron(V4, pp=2, switches={"pipeline_layout": text})
    (finding,) = [one for one in check_layout(job) if one.rule == "pipeline-string"]
    assert said in finding.message
    assert finding.repair


def test_mtp_layers_lie_on_one_stage_in_the_last_chunk() -> None:
    good = megatron(V4, pp=2, switches={"pipeline_layout": "Et*11|t*11|t*11|t*10mL"})
    assert [one.rule for one in check_layout(good) if one.severity == "error"] == []


# --- virtual stages ---------------------------------------------------------------------------------------------------


def test_virtual_stages_have_three_spellings() -> None:
    by_number = TrainLayout(pp=2, virtual_stages=3)
    by_layers = TrainLayout(pp=2, switches=MegatronSwitches(layers_per_virtual_stage=6))
    by_text = TrainLayout(pp=2, switches=MegatronSwitches(pipeline_layout="Et*6|t*6|t*6|t*6|t*6|t*6L"))
    assert {virtual_stages(36, layout) for layout in (by_number, by_layers, by_text)} == {3}
    assert len({stage_counts(36, layout) for layout in (by_number, by_layers, by_text)}) == 1


# --- GLM --------------------------------------------------------------------------------------------------------------


def naive_glm(pp: int) -> set[tuple[int, int]]:
    """Every (first, last) whose stages begin on a layer with an indexer of its own: 0, 1, 2, 6, 10, …, 74."""
    own = {0, 1, *range(2, 78, 4)}
    found: set[tuple[int, int]] = set()
    for first, last in itertools.product(range(1, 78), repeat=2):
        rest = 78 - first - last
        between = pp - 2
        if rest < 0 or (between and (rest % between or not rest)) or (not between and rest):
            continue
        middle = rest // between if between else 0
        starts = [0, *(first + index * middle for index in range(between)), 78 - last]
        if own.issuperset(starts):
            found.add((first, last))
    return found


PUBLISHED = {
    2: {(38, 40)},
    3: {(26, 28)},
    4: {(18, 20), (22, 16)},
    6: {(14, 16)},
    8: {(14, 16), (18, 12)},
    12: {(18, 20)},
    16: {(10, 12), (14, 8)},
}


@pytest.mark.parametrize("pp", sorted(PUBLISHED))
def test_glm_splits_are_those_of_an_enumeration(pp: int) -> None:
    model = model_shape(GLM)
    layout = TrainLayout(backend="megatron", pp=pp)
    starts = allowed_starts(megatron(GLM))
    assert starts == model.index_layers
    ends = {
        (held[0], held[-1])
        for split in splits(78, layout, starts)
        if (held := stage_counts(78, split)) and len(held) > 1
    }
    assert ends == naive_glm(pp)
    assert ends >= PUBLISHED[pp]


@pytest.mark.parametrize("pp", [2, 3, 6, 13, 26, 39])
def test_no_even_split_of_glm_is_legal(pp: int) -> None:
    found = [one for one in check_layout(megatron(GLM, gpus=pp, pp=pp)) if one.severity == "error"]
    assert [one.rule for one in found] == ["indexer-stage-start"]


def test_the_repair_of_a_glm_split_is_the_nearest_that_is_legal() -> None:
    job = megatron(GLM, pp=4, first_stage_layers=19, last_stage_layers=19)
    (finding,) = [one for one in check_layout(job) if one.rule == "indexer-stage-start"]
    assert "19, 39, 59" in finding.message
    assert "first_stage_layers 19 → 18, last_stage_layers 19 → 20" in finding.repair


def test_virtual_stages_of_glm_must_start_on_an_indexer_too() -> None:
    found = [
        one.rule
        for one in check_layout(megatron(GLM, pp=2, virtual_stages=2, first_stage_layers=38, last_stage_layers=40))
    ]
    assert "indexer-stage-start" in found


def test_splits_come_nearest_first() -> None:
    """Without a wish the most even one, the smaller stage last; with one, the nearest."""
    bare = splits(43, TrainLayout(pp=8))[0]
    assert (bare.first_stage_layers, bare.last_stage_layers) == (4, 3)
    asked = splits(78, TrainLayout(pp=4, first_stage_layers=30, last_stage_layers=10))[0]
    assert stage_counts(78, asked) == (30, 19, 19, 10)


def test_a_string_that_is_no_layout_beside_another_spelling_is_two_violations() -> None:
    switches = MegatronSwitches(pipeline_layout="Et*9|x|tL", layers_per_virtual_stage=3)
    job = replace(megatron(DENSE, pp=4), train=TrainLayout(backend="megatron", pp=4, switches=switches))
    found = {finding.rule: finding.message for finding in check_layout(job)}
    assert "has x: its elements are E, t, m, L and |" in found["pipeline-string"]
    assert "virtual-spelling" in found


@pytest.mark.parametrize("text", ["Et*999999999|L", "E(t*9999)*9999|L", "E" + "(t*9)*99999|L"])
def test_a_layout_string_of_endless_repetitions_is_refused(text: str) -> None:
    with pytest.raises(SplitError, match="more than 65536 elements"):
        parse_layout(text)


@pytest.mark.parametrize("layers", [0, -1])
def test_virtual_stages_have_a_layer_at_least(layers: int) -> None:
    layout = TrainLayout(backend="megatron", pp=4, switches=MegatronSwitches(layers_per_virtual_stage=layers))
    with pytest.raises(SplitError, match=f"virtual stages of {layers} layers"):
        stage_counts(48, layout)


@pytest.mark.parametrize("pp", [2, 7, 11, 37])
def test_splits_of_very_deep_models_are_found_in_bounded_time(pp: int) -> None:
    """Every pair of end stages of 1440 layers is a million splits: near the even one there are enough."""
    began = time.process_time()
    layout = TrainLayout(backend="megatron", pp=pp)
    found = splits(1441, layout)
    assert time.process_time() - began < 5
    assert sum(stage_counts(1441, found[0])) == 1441
    assert max(stage_counts(1441, found[0])) == -(-1441 // pp)
    given = replace(layout, first_stage_layers=3)
    assert abs((splits(1441, given)[0].first_stage_layers or 0) - 3) <= 1
