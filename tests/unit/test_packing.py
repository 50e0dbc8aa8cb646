"""The planner covers every wanted token once, in any layout, within its budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.train.packing import Layout, MicroBatch, WantedTokens, plan

LAYOUTS: tuple[Layout, ...] = ("single", "padded", "packed", "shared_prompt")


@st.composite
def batches(draw: st.DrawFn) -> list[WantedTokens]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(1, 50), min_size=1, max_size=12))
        for _ in range(draw(st.integers(1, 4))):
            rest = draw(st.lists(st.integers(1, 50), min_size=0, max_size=20))
            wanted = [False] * len(prompt) + [draw(st.booleans()) for _ in rest]
            found.append(WantedTokens(np.array(prompt + rest, dtype=np.int32), np.array(wanted)))
    return found


def visible(batch: MicroBatch, flat: int) -> list[int]:
    """Flat positions that position ``flat`` sees, in order."""
    width = batch.input_ids.shape[1]
    row, column = divmod(flat, width)
    columns = range(column + 1)
    if batch.segments is not None and batch.prefixes is not None:
        segments, own, prefix = batch.segments[row], batch.segments[row, column], batch.prefixes[row, column]
        columns = [k for k in columns if segments[k] in (own, prefix)]
    return [row * width + k for k in columns]


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from(LAYOUTS), st.integers(1, 120))
def test_every_wanted_token_is_predicted_once_from_exactly_its_own_context(
    sequences: list[WantedTokens], layout: Layout, budget: int
) -> None:
    seen = set()
    for batch in plan(sequences, layout, budget):
        ids, positions = batch.input_ids.ravel(), batch.position_ids.ravel()
        assert (np.diff(batch.predictors) >= 0).all()
        for where, token, index, position in zip(
            batch.predictors, batch.tokens, batch.sequences, batch.positions, strict=True
        ):
            assert (index, position) not in seen
            seen.add((index, position))
            context = visible(batch, int(where))
            assert ids[context].tolist() == sequences[index].tokens[:position].tolist()
            assert positions[context].tolist() == list(range(position))
            assert token == sequences[index].tokens[position]
    expected = {(i, int(p)) for i, s in enumerate(sequences) for p in np.flatnonzero(s.wanted)}
    assert seen == expected


@settings(max_examples=40, deadline=None)
@given(batches(), st.sampled_from(LAYOUTS), st.integers(1, 120))
def test_the_budget_holds_unless_one_sequence_alone_exceeds_it(
    sequences: list[WantedTokens], layout: Layout, budget: int
) -> None:
    longest = max((int(np.flatnonzero(s.wanted)[-1]) for s in sequences if s.wanted.any()), default=0)
    for batch in plan(sequences, layout, budget):
        assert batch.num_tokens <= max(budget, longest)
        assert batch.num_tokens <= budget or batch.input_ids.shape[0] == 1


def group(prompt_length: int, lengths: list[int]) -> list[WantedTokens]:
    prompt = np.arange(1, prompt_length + 1, dtype=np.int32)
    return [
        WantedTokens(np.concatenate([prompt, np.full(n, 7, np.int32)]), np.arange(prompt_length + n) >= prompt_length)
        for n in lengths
    ]


def test_a_shared_prompt_is_stored_once_and_last_tokens_never() -> None:
    sequences = group(40, [8] * 8)
    (batch,) = plan(sequences, "shared_prompt", 4096)
    assert batch.segments is not None
    assert int((batch.segments >= 0).sum()) == 40 + 8 * 7
    (alone,) = plan(sequences, "padded", 4096)
    assert alone.num_tokens == 8 * 47


def routed(experts: list[list[int]] | None, own: int) -> WantedTokens:
    """Five prompt tokens, of which the last ``len(experts)`` have the given pairs (−1: missing), and two sampled ones
    with experts of their ``own``."""
    routes = None
    if experts is not None:
        routes = np.full((6, 1, 2), -1, dtype=np.int32)
        routes[5 - len(experts) : 5, 0] = experts
        routes[5, 0] = [own, own + 9]
    return WantedTokens(np.arange(1, 8, dtype=np.int32), np.arange(7) >= 5, routes)


@pytest.mark.parametrize(
    ("experts", "parts"),
    [
        ([[[0, 1]], [[1, 0]]], [{0, 1}]),  # a set, in any order
        ([[[0, 1]], [[2, 1]]], [{0}, {1}]),
        ([[[0, 2]], [[1, 2]]], [{0}, {1}]),  # expert 0 is no missing one
        ([[[0, 2]], [[-1, -1]], [[1, 2]]], [{0, 1}, {2}]),
        ([[[0, 1]], [[-1, -1]], [[0, 1]]], [{0, 1, 2}]),
        ([[[-1, -1]], [[0, 1]], [[2, 3]], [[2, 3]]], [{0, 1}, {2, 3}]),  # what is missing is taken from the first
        ([[[-1, -1], [4, 5]], [[0, 1], [-1, -1]], [[0, 1], [4, 6]]], [{0, 1}, {2}]),
        ([None, [[0, 1]], None, [[0, 1]]], [{0, 2}, {1, 3}]),  # not replayed at all
        ([[[4, 5], [0, 1]], [[6, 5], [0, 1]]], [{0}, {1}]),  # every prompt position counts, not the last alone
    ],
)
def test_a_prompt_is_shared_by_those_whose_experts_agree_on_it(experts: list, parts: list[set[int]]) -> None:
    found: dict[tuple[int, ...], set[int]] = {}
    for batch in plan([routed(each, own) for own, each in enumerate(experts)], "shared_prompt", 4096):
        for index, inputs in batch.inputs.items():
            found.setdefault((id(batch), *inputs[:5].tolist()), set()).add(index)
    assert sorted(found.values(), key=min) == parts


def test_a_group_longer_than_a_row_repeats_its_prompt_in_each_row() -> None:
    batches = plan(group(40, [50] * 8), "shared_prompt", 4096)
    rows = sum(batch.input_ids.shape[0] for batch in batches)
    assert rows > 1
    assert sum(len(batch.members) for batch in batches) == 8


def test_padding_is_small_where_lengths_differ_because_rows_are_sorted() -> None:
    generator = np.random.default_rng(0)
    sequences = [group(1, [int(n)])[0] for n in generator.integers(5, 200, 64)]
    needed = sum(len(s.tokens) - 1 for s in sequences)
    longest = max(len(s.tokens) - 1 for s in sequences)
    assert longest * len(sequences) > 1.8 * needed
    for layout in ("padded", "packed"):
        assert sum(b.num_tokens for b in plan(sequences, layout, 1024)) < 1.2 * needed


def test_sequences_without_a_wanted_token_are_left_out() -> None:
    nothing = WantedTokens(np.arange(5, dtype=np.int32), np.zeros(5, dtype=np.bool_))
    assert plan([nothing], "packed", 64) == []


def test_the_first_token_cannot_be_wanted() -> None:
    with pytest.raises(ValueError, match="sequence 0: the log-prob of the first token"):
        plan([WantedTokens(np.arange(3, dtype=np.int32), np.ones(3, dtype=np.bool_))], "padded", 64)
