"""Turns of an agent loop become sequences: every sampled token once, in its own context, in as few as possible."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.records import Completion
from lockstep.turns import Fork, JoinedTurns, Turn, join_turns, turn_metrics

SYSTEM, THINK, ANSWER, TOOL = [1, 2], [30, 31], [40, 41], [50]


def turn(prompt: list[int], tokens: list[int], number: int = 0, **fields: object) -> Turn:
    """Log-probs tell the token apart from every other one: −(100 · number + place)."""
    logprobs = [-100.0 * number - place for place in range(len(tokens))]
    return Turn(prompt, tokens, logprobs, [number] * len(tokens), **fields)  # pyright: ignore[reportArgumentType]


def agent_turns(num: int, *, keeps_reasoning: bool) -> list[Turn]:
    """A thinking model and a tool; the template keeps earlier reasoning in the history or leaves it out."""
    history, turns = list(SYSTEM), []
    for number in range(num):
        turns.append(turn(list(history), [*THINK, *ANSWER], number))
        history += [*(THINK if keeps_reasoning else []), *ANSWER, *TOOL]
    return turns


def sampled(joined: JoinedTurns) -> list[tuple[list[int], int, float, int]]:
    """(context, token, log-prob, version) of every token that counts."""
    return [
        (s.tokens[:t].tolist(), int(s.tokens[t]), float(s.logprobs[t]), int(s.versions[t]))
        for s in joined.sequences
        for t in np.flatnonzero(s.loss_mask)
    ]


def as_sent(turns: list[Turn]) -> list[tuple[list[int], int, float, int]]:
    return [
        ([*one.prompt_tokens, *one.tokens[:place]], one.tokens[place], one.logprobs[place], one.versions[place])  # pyright: ignore
        for one in turns
        for place in range(len(one.tokens))
    ]


def test_a_history_that_grows_is_one_sequence_with_tool_tokens_masked() -> None:
    joined = join_turns("r", agent_turns(3, keeps_reasoning=True))
    (sequence,) = joined.sequences
    once = [*THINK, *ANSWER]
    assert sequence.sequence_id == "r/0"
    assert sequence.tokens.tolist() == [*SYSTEM, *once, *TOOL, *once, *TOOL, *once]
    assert sequence.loss_mask.tolist() == [False] * 2 + ([True] * 4 + [False]) * 2 + [True] * 4
    assert sequence.versions.tolist() == [-1] * 2 + [0] * 4 + [-1] + [1] * 4 + [-1] + [2] * 4
    assert (joined.num_turns, joined.forks) == (3, ())
    assert turn_metrics([joined])["turns/fork_rate"] == 0


def test_reasoning_left_out_of_the_history_begins_a_sequence_and_keeps_ids_and_masks() -> None:
    """The next prompt of a thinking model is no extension of what was sampled (B5)."""
    turns = agent_turns(3, keeps_reasoning=False)
    joined = join_turns("r", turns)
    assert [s.tokens.tolist() for s in joined.sequences] == [[*one.prompt_tokens, *one.tokens] for one in turns]
    assert [np.flatnonzero(s.loss_mask).tolist() for s in joined.sequences] == [
        list(range(len(one.prompt_tokens), len(one.prompt_tokens) + 4)) for one in turns
    ]
    # What differs is the first token after the system prompt: reasoning there, the answer here.
    assert joined.forks[0] == Fork(turn=2, num_common=2, num_tokens=6)
    assert sampled(joined) == as_sent(turns)


def test_a_rollout_of_many_forks_is_bounded_and_says_what_it_left_out() -> None:
    """Eight rollouts of eight turns were 64 samples (B6)."""
    rollouts = [agent_turns(8, keeps_reasoning=False) for _ in range(8)]
    free = [join_turns(str(i), turns) for i, turns in enumerate(rollouts)]
    bounded = [join_turns(str(i), turns, max_sequences=3) for i, turns in enumerate(rollouts)]
    assert sum(len(one.sequences) for one in free) == 64
    assert sum(len(one.sequences) for one in bounded) == 24
    metrics = turn_metrics(bounded)
    assert metrics["turns/fork_rate"] == 1
    assert metrics["turns/sequences_max"] == metrics["turns/sequences_mean"] == 3
    assert metrics["turns/dropped_sequences"] == 8 * 5
    assert metrics["turns/dropped_tokens"] == 8 * 5 * 4
    last = [s.versions.max() for s in bounded[0].sequences]
    assert last == [5, 6, 7], "of equally long ones the later are kept, in order"
    assert turn_metrics(free)["turns/dropped_tokens"] == 0


def test_the_longest_sequences_are_kept() -> None:
    joined = join_turns("r", [turn([1], [2, 3, 4], 0), turn([5], [6], 1), turn([7], [8, 9], 2)], max_sequences=2)
    assert [s.tokens.tolist() for s in joined.sequences] == [[1, 2, 3, 4], [7, 8, 9]]
    assert (joined.num_dropped_sequences, joined.num_dropped) == (1, 1)


def test_a_fork_from_an_earlier_turn_extends_that_turns_sequence_once() -> None:
    turns = [turn([1], [2], 0), turn([1, 2, 3], [4], 1), turn([1, 2, 5], [6], 2), turn([1, 2, 3, 4, 7], [8], 3)]
    joined = join_turns("r", turns)
    assert [s.tokens.tolist() for s in joined.sequences] == [[1, 2, 5, 6], [1, 2, 3, 4, 7, 8]]
    assert [s.loss_mask.tolist() for s in joined.sequences] == [[0, 0, 0, 1], [0, 1, 0, 1, 0, 1]]
    assert joined.forks == (Fork(turn=3, num_common=2, num_tokens=4),)


turn_lists = st.lists(
    st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=6), st.lists(st.integers(1, 2), max_size=2)),
    max_size=7,
)


@given(turn_lists)
def test_every_sampled_token_counts_once_in_the_context_it_was_sampled_in(given_turns) -> None:
    turns = [turn(prompt, tokens, number) for number, (prompt, tokens) in enumerate(given_turns)]
    joined = join_turns("r", turns)
    assert sorted(sampled(joined), key=str) == sorted(as_sent(turns), key=str)
    for sequence in joined.sequences:
        outside = ~sequence.loss_mask
        assert (sequence.versions[outside] == -1).all()
        assert (sequence.kv_versions[outside] == -1).all()
        assert not sequence.logprobs[outside].any()
    last = [int(s.versions.max()) for s in joined.sequences]
    assert all(first < second for first, second in pairwise(last))
    assert joined.num_turns + joined.num_empty_turns == len(turns)
    assert len(joined.forks) == max(len(joined.sequences) - 1, 0)


@given(turn_lists)
def test_no_other_way_to_join_them_has_fewer_sequences(given_turns) -> None:
    """The fewest paths that cover the order "may be extended by" are its turns less a largest matching (Fulkerson)."""
    turns = [turn(prompt, tokens, number) for number, (prompt, tokens) in enumerate(given_turns) if tokens]
    whole = [[*one.prompt_tokens, *one.tokens] for one in turns]
    later = {
        i: [j for j in range(i + 1, len(turns)) if list(turns[j].prompt_tokens[: len(whole[i])]) == whole[i]]
        for i in range(len(turns))
    }
    matched: dict[int, int] = {}

    def match(i: int, seen: set[int]) -> bool:
        for j in later[i]:
            if j not in seen:
                seen.add(j)
                if j not in matched or match(matched[j], seen):
                    matched[j] = i
                    return True
        return False

    size = sum(match(i, set()) for i in range(len(turns)))
    assert len(join_turns("r", turns).sequences) == len(turns) - size


def test_a_turn_that_sampled_nothing_leaves_no_trace() -> None:
    joined = join_turns("r", [turn([1], []), turn([1, 9], [2], 1)])
    assert [s.tokens.tolist() for s in joined.sequences] == [[1, 9, 2]]
    assert (joined.num_turns, joined.num_empty_turns, joined.forks) == (1, 1, ())
    assert "turns/fork_rate" not in turn_metrics([joined]), "one turn can't fork"
    assert join_turns("r", []).sequences == ()
    assert "turns/sequences_mean" not in turn_metrics([])


def test_without_word_of_the_cache_it_is_taken_to_be_as_old_as_the_rollouts_oldest_token() -> None:
    turns = [
        Turn([1], [2, 3], [-1.0, -1.0], [4, 5]),
        Turn([1, 2, 3], [6], [-1.0], [7]),
        Turn([9], [6], [-1.0], [7], [7]),
    ]
    first, second = join_turns("r", turns).sequences
    assert first.kv_versions.tolist() == [-1, 4, 4, 4]
    assert second.kv_versions.tolist() == [-1, 7], "what the engine tells is taken"


def test_expert_ids_are_those_of_the_first_turn_that_told_them() -> None:
    def routes(*ids: int) -> np.ndarray:
        return np.array(ids, np.uint8).reshape(-1, 1, 1)

    turns = [
        turn([1, 2], [3], 0, routes=routes(10, 11)),
        turn([1, 2, 3, 4], [5, 6], 1, routes=routes(255, 21, 22, 23, 24)),
        turn([1, 2, 3, 4, 5, 6], [7], 2),
    ]
    (sequence,) = join_turns("r", turns).sequences
    assert sequence.routes is not None
    assert sequence.routes.ravel().tolist() == [10, 11, 22, 23, 24, 255]
    with pytest.raises(ValueError, match=r"sequence r/0: expert ids of its turns differ"):
        join_turns("r", [turns[0], turn([1, 2, 3], [4], 1, routes=np.zeros((3, 2, 1), np.uint8))])


def test_a_completion_of_ours_is_a_turn() -> None:
    ids = np.array([7, 8], np.int32)
    completion = Completion("q", ids, np.array([-1, -2], np.float32), ids * 0 + 3, ids * 0 + 2, "stop")
    (sequence,) = join_turns("r", [Turn.of(np.array([5], np.int32), completion)], vocab_size=9).sequences
    assert sequence.tokens.tolist() == [5, 7, 8]
    assert sequence.kv_versions.tolist() == [-1, 2, 2]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt_tokens": []}, "the prompt has no token"),
        ({"prompt_tokens": [1.0]}, "prompt_tokens must be a list of integers, not float64"),
        ({"prompt_tokens": [True]}, "prompt_tokens must be a list of integers, not bool"),
        ({"prompt_tokens": [[1]]}, "prompt_tokens must be a list of integers"),
        ({"prompt_tokens": "text"}, "prompt_tokens must be a list of integers"),
        ({"tokens": [2, -1]}, r"tokens\[1\] is -1; expected are integers from 0 to 9"),
        ({"tokens": [2, 10]}, r"tokens\[1\] is 10; expected are integers from 0 to 9"),
        ({"tokens": [2]}, "2 logprobs for 1 sampled tokens"),
        ({"logprobs": [2, 3]}, "logprobs must be a list of floats"),
        ({"versions": [0]}, "1 versions for 2 sampled tokens"),
        ({"versions": [0, -1]}, r"versions\[1\] is -1"),
        ({"kv_versions": [0]}, "1 kv_versions for 2 sampled tokens"),
        ({"routes": np.zeros((1, 1, 1), np.uint8)}, r"expert ids are uint8 \(1, 1, 1\)"),
        ({"routes": np.zeros((2, 1, 1), np.int64)}, r"expert ids are int64"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(changed: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {"prompt_tokens": [1], "tokens": [2, 3], "logprobs": [-1.0, -2.0], "versions": [0, 0]}
    good = Turn(**fields)  # pyright: ignore[reportArgumentType]
    bad = Turn(**(fields | changed))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=f"rollout r, turn 2: .*{message}"):
        join_turns("r", [good, bad], vocab_size=10)


def test_a_bound_below_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="max_sequences is 0; at least 1"):
        join_turns("r", [], max_sequences=0)
