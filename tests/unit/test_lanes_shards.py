"""Shards: each test in exactly one, near the optimum; times: measured ones before estimates, drift reported."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.lanes import LanesError
from lockstep.lanes.declare import Case
from lockstep.lanes.history import History, drifts, junit_key, load_history, read_junit, save_history
from lockstep.lanes.shards import num_shards_for, parse_shard, shard_of_unplanned, split
from tests.unit.lanes_planted import HEAD, lanes, mark, plant, run_pytest

MINUTES = st.dictionaries(st.text("abc/:", min_size=1, max_size=6), st.floats(0.01, 300), max_size=30)


@given(MINUTES, st.integers(1, 9))
def test_every_test_is_in_exactly_one_shard_whatever_the_order(minutes: dict[str, float], num_shards: int) -> None:
    shards = split(minutes, num_shards)
    assert len(shards) == num_shards
    assert sorted(itertools.chain(*shards)) == sorted(minutes)
    assert split(dict(reversed(minutes.items())), num_shards) == shards


def optimum(minutes: list[float], num_shards: int) -> float:
    """The shortest longest shard, over all divisions."""
    loads = [
        max(sum(m for m, s in zip(minutes, chosen, strict=True) if s == shard) for shard in range(num_shards))
        for chosen in itertools.product(range(num_shards), repeat=len(minutes))
    ]
    return min(loads)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(1, 3))
def test_the_longest_shard_is_within_grahams_bound_of_the_optimum(minutes: list[int], num_shards: int) -> None:
    named = {str(n): float(value) for n, value in enumerate(minutes)}
    longest = max(sum(named[name] for name in shard) for shard in split(named, num_shards))
    best = optimum([float(value) for value in minutes], num_shards)
    assert best <= longest <= best * (4 / 3 - 1 / (3 * num_shards)) + 1e-9


def test_small_cases_are_optimal() -> None:
    assert sorted(map(sorted, split({"a": 8, "b": 4, "c": 4}, 2))) == [["a"], ["b", "c"]]
    assert sorted(map(len, split(dict.fromkeys("abcdef", 1.0), 3))) == [2, 2, 2]


@given(st.text(max_size=20), st.integers(1, 12))
def test_a_test_that_only_collection_finds_has_one_shard(name: str, num_shards: int) -> None:
    assert 0 <= shard_of_unplanned(name, num_shards) < num_shards


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "1/0", "a/b", "1/2/3", "-1/3", ""])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(LanesError, match="expected K/N with 1 ≤ K ≤ N"):
        parse_shard(text)


def test_the_number_of_shards_follows_the_time() -> None:
    assert num_shards_for([10, 10, 10, 10], 20, 8) == 2
    assert num_shards_for([100, 1], 20, 8) == 2
    assert num_shards_for([10] * 40, 20, 8) == 8
    assert num_shards_for([0.1], 20, 8) == 1


# --- measured times ---------------------------------------------------------------------------------------------------


def a_case(minutes: float = 10, *, declared: bool = True, hardware: str = "h200") -> Case:
    return Case("tests/test_a.py::TestB::test_c", "tests/test_a.py:3", "one", "one-gpu", "cuda", hardware, 1, minutes,
                declared=declared)  # fmt: skip


def measured(*runs: float, hardware: str = "h200") -> History:
    history = History({})
    for minutes in runs:
        history = history.record(hardware, {junit_key(a_case().test_id): minutes})
    return history


def test_measured_minutes_come_before_the_estimate_and_are_smoothed() -> None:
    assert History({}).minutes(a_case()) == 10
    assert measured(4).minutes(a_case()) == 4
    assert measured(4, 8).minutes(a_case()) == pytest.approx(0.7 * 4 + 0.3 * 8)
    assert measured(4, 8, 2).minutes(a_case()) == pytest.approx(0.7 * (0.7 * 4 + 0.3 * 8) + 0.3 * 2)
    assert measured(4, hardware="mi350").minutes(a_case()) == 10, "another machine's time is not this one's"


@pytest.mark.parametrize(
    ("minutes", "says"),
    [(4.9, "write minutes=4.9"), (21, "write minutes=21"), (5.1, None), (19.9, None), (0.0001, "write minutes=0.01")],
)
def test_an_estimate_that_is_off_by_more_than_two_is_reported_with_the_value(minutes: float, says: str | None) -> None:
    found = drifts([a_case()], measured(minutes))
    assert len(found) == (says is not None)
    if says is not None:
        assert says in found[0]
        assert found[0].startswith("tests/test_a.py:3: minutes=10, measured")


@pytest.mark.parametrize(("estimate", "named"), [(0.005, False), (0.01, False), (1.0, True)])
def test_a_test_that_takes_no_time_is_measured_as_the_least_estimate(estimate: float, named: bool) -> None:
    found = drifts([a_case(estimate)], measured(0.0))
    assert [("write minutes=0.01" in line) for line in found] == [True] * named


def test_a_test_without_a_mark_is_told_to_get_one_only_if_it_is_long() -> None:
    short, long = (drifts([a_case(0.05, declared=False)], measured(m)) for m in (0.5, 4.0))
    assert short == []
    assert "mark it with minutes=4" in long[0]


def test_pytests_junit_file_gives_the_minutes_of_what_passed(tmp_path: Path) -> None:
    text = HEAD + "import time\nclass TestB:\n    @pytest.mark.parametrize('n', [1, 2])\n"
    text += "    def test_c(self, n): time.sleep(0.1)\n"
    text += "def test_bad(): assert False\ndef test_skip(): pytest.skip()\n"
    root = plant(tmp_path, {"tests/below/test_a.py": text})
    run_pytest(root, "tests", "--junitxml=junit.xml")
    minutes = read_junit(root / "junit.xml")
    assert list(minutes) == [junit_key("tests/below/test_a.py::TestB::test_c")]
    assert 0.2 <= minutes["tests.below.test_a.TestB::test_c"] * 60 < 5


def test_the_command_records_a_run_and_the_plan_uses_it(tmp_path: Path) -> None:
    text = HEAD + mark("cpu-long", '{"cpu": "cpu"}', 15) + "def test_a(): pass\n"
    root = plant(tmp_path, {"tests/test_a.py": text})
    run_pytest(root, "--lane", "cpu-long", "--junitxml=junit.xml")
    code, out, _ = lanes(root, "history", "junit.xml", "--hardware", "cpu")
    assert code == 0
    assert "tests/test_a.py:4: minutes=15, measured" in out
    assert "write minutes=0.01" in lanes(root, "plan", "--no-collect")[1]
    assert lanes(root, "history", "junit.xml", "--hardware", "gpu")[0] == 2


@pytest.mark.parametrize("text", ["", "<testsuites>", '<!DOCTYPE x [<!ENTITY a "b">]><testsuites/>', "\ufffe"])
def test_a_file_that_is_not_junit_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(LanesError, match=r"junit\.xml"):
        read_junit(path)


def test_history_survives_writing_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lanes/history.json"
    save_history(measured(4, 4), path)
    assert load_history(path) == measured(4, 4)
    assert load_history(tmp_path / "absent.json") == History({})
    path.write_text('{"times": {"h200": {"a": {"minutes": "x"}}}}')
    with pytest.raises(LanesError, match="is not a history of lanes"):
        load_history(path)
    path.write_text('{"times": {"h200": {"a": {"minutes": NaN, "num_runs": 1}}}}')
    with pytest.raises(LanesError, match="is not a history of lanes"):
        load_history(path)


@pytest.mark.parametrize("time", ["-3.5", "nan", "inf", "soon"])
def test_a_time_that_can_not_be_one_is_refused(tmp_path: Path, time: str) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(f'<testsuites><testcase classname="a" name="test_b" time="{time}"/></testsuites>')
    with pytest.raises(LanesError, match=f"a::test_b has time {time}; expected seconds from 0"):
        read_junit(path)
