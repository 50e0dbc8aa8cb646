"""Gates, verdicts, status, debt and coverage: what ran is told with its values, and what did not run is never green."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.lanes import LanesError
from lockstep.lanes.commands import read_results
from lockstep.lanes.debt import debt
from lockstep.lanes.evidence import Gate, Result, Run, read_run, read_runs, write_run
from lockstep.lanes.plan import Plan, make_plan, read_project
from lockstep.lanes.recorder import GateFailed, Recorder
from lockstep.lanes.status import coverage, coverage_block, gates_text, replace_block, status
from lockstep.lanes.verdict import check_runs, may_start
from tests.unit.lanes_planted import HEAD, commit, lanes, mark, plant

TODAY = date(2027, 1, 15)
BOTH = '{"cuda": "h200", "rocm": "mi300x"}'
OFF = 'disabled={"rocm": Disabled(reason="hangs in all-to-all", issue="#7", expires="2027-02-01")}'
FILES = {
    "tests/test_a.py": "def test_a(): pass\n",
    "tests/test_b.py": HEAD
    + mark("one", BOTH, more='recipe="tiny", gates=["agreement"]')
    + "def test_b(): pass\n"
    + mark("one", BOTH, more=OFF)
    + "def test_c(): pass\n",
}
B, C = "tests/test_b.py::test_b", "tests/test_b.py::test_c"


def a_run(plan: Plan | None = None, **more: Any) -> Run:
    values: dict[str, Any] = {
        "lane": "one", "stage": "one-gpu", "hardware": "h200", "vendor": "cuda", "devices": ("NVIDIA H200",),
        "source": "nvidia-smi", "shard": "1/1", "commit": plan.commit if plan else "c" * 40,
        "started": "2027-01-10T08:00:00+00:00", "minutes": 3.0, "exit_status": 0, "command": ("--lane", "one"),
        "tests": (passed(B), passed(C)),
    }  # fmt: skip
    return Run(**(values | more))


def passed(test_id: str, **more: Any) -> Result:
    return Result(**({"test_id": test_id, "outcome": "passed", "minutes": 1.0} | more))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return commit(plant(tmp_path, FILES))


# --- gates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "bound", "sense", "passes"),
    [(0.01, 0.07, "at_most", True), (0.07, 0.07, "at_most", True), (0.08, 0.07, "at_most", False),
     (0.6, 0.5, "at_least", True), (0.4, 0.5, "at_least", False), (math.nan, 1, "at_most", False),
     (-math.inf, 1, "at_most", False), (math.inf, 1, "at_least", False)],
)  # fmt: skip
def test_a_gate_is_recorded_and_then_judged(value: float, bound: float, sense: Any, passes: bool) -> None:
    recorder = Recorder()
    if passes:
        recorder.gate("agreement", value, bound, sense)
    else:
        with pytest.raises(GateFailed, match="gate agreement"):
            recorder.gate("agreement", value, bound, sense)
    assert [gate.passed for gate in recorder.gates] == [passes]


def test_one_spike_is_an_alarm_and_no_failure() -> None:
    """Fault H8: a threshold on the mean failed a night's run for one outlier in 100 steps."""
    recorder = Recorder()
    series = [0.01] * 99 + [50.0]
    recorder.series("agreement", series, 0.07, outlier=1.0)
    (gate,) = recorder.gates
    assert (gate.value, gate.outliers, gate.passed) == (0.01, (50.0,), True)
    assert sum(series) / 100 > 0.07
    with pytest.raises(GateFailed):
        recorder.series("agreement", [0.1] * 60 + [0.01] * 40, 0.07)
    with pytest.raises(GateFailed):
        recorder.series("agreement", [0.01] * 99 + [math.nan], 0.07)
    with pytest.raises(ValueError, match="0 values"):
        recorder.series("agreement", [], 0.07)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_the_quantile_is_numpys(values: list[float], quantile: float) -> None:
    recorder = Recorder()
    recorder.series("x", values, 1e9, quantile=quantile)
    assert recorder.gates[0].value == pytest.approx(float(np.quantile(values, quantile)), rel=1e-9, abs=1e-6)


def test_only_a_held_claim_passes() -> None:
    recorder = Recorder()
    recorder.claim("names", "held")
    with pytest.raises(GateFailed, match="claim behaves: not checked"):
        recorder.claim("behaves", "not checked")
    assert [gate.text() for gate in recorder.gates] == ["names held", "behaves not held"]


# --- verdict ----------------------------------------------------------------------------------------------------------


def planned(root: Path) -> Plan:
    return make_plan(read_project(root), today=TODAY, labels=["run-h200"], stages=["one-gpu"])


def test_what_was_planned_and_ran_is_green(root: Path) -> None:
    plan = planned(root)
    assert plan.problems == ()
    assert check_runs(plan, [a_run(plan)]) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (None, "one on h200, shard 1/1: never ran, though 2 tests were planned"),
        ({"commit": "d" * 40}, "never ran"),
        ({"hardware": "mi300x"}, "never ran"),
        ({"tests": (passed(B),)}, f"{C} was planned and did not run"),
        ({"tests": (passed(B), passed(C), passed(C))}, f"{C} ran 2 times"),
        ({"tests": (passed(B), passed(C, outcome="failed", why="call: boom"))}, f"{C} failed: call: boom"),
        ({"exit_status": 2}, "pytest ended with 2"),
        ({"tests": (passed(B), passed(C, gates=(Gate("x", 2.0, 1.0, "at_most"),)))}, f"{C}: gate x 2 > bound 1"),
    ],
)
def test_what_did_not_run_as_planned_is_red(root: Path, change: dict[str, Any] | None, says: str) -> None:
    plan = planned(root)
    problems = check_runs(plan, [] if change is None else [a_run(plan, **change)])
    assert any(says in problem for problem in problems)


def test_a_job_that_was_started_again_replaces_its_first_run(root: Path) -> None:
    plan = planned(root)
    bad = a_run(plan, tests=(passed(B, outcome="failed"), passed(C)), exit_status=1)
    assert check_runs(plan, [bad, a_run(plan, started="2027-01-10T09:00:00+00:00")]) == []
    assert check_runs(plan, [a_run(plan), replace(bad, started="2027-01-10T09:00:00+00:00")]) != []


def test_a_test_in_two_shards_is_red(root: Path) -> None:
    plan = planned(root)
    (job,) = plan.jobs
    two = replace(
        plan, jobs=(replace(job, shard="1/2", tests=job.tests[:1]), replace(job, shard="2/2", tests=job.tests[1:]))
    )
    runs = [a_run(plan, shard="1/2"), a_run(plan, shard="2/2")]
    assert f"one on h200: {B} ran in shards 1/2, 2/2" in check_runs(two, runs)


def test_a_red_or_empty_plan_has_no_green_verdict(root: Path) -> None:
    plan = planned(root)
    assert check_runs(replace(plan, problems=("expired",)), [a_run(plan)]) == ["the plan is red: expired"]
    assert check_runs(replace(plan, jobs=()), []) == ["not tested: the plan has no job"]


def test_the_command_exits_with_the_verdict(root: Path) -> None:
    lanes(root, "plan", "--no-collect", "--stage", "one-gpu", "--labels", "run-h200", "--out", "plan.json")
    code, out, _ = lanes(root, "verdict", "--plan", "plan.json")
    assert code == 1
    assert "never ran" in out
    write_run(a_run(Plan.from_json((root / "plan.json").read_text(), "x")), root / "lanes/evidence")
    assert lanes(root, "verdict", "--plan", "plan.json")[:2] == (0, "green: 2 tests in 1 jobs ran as planned\n")
    assert lanes(root, "verdict", "--plan", "plan.json", "--evidence", "nowhere")[0] == 2


@pytest.mark.parametrize(
    ("results", "start"),
    [
        ({"cpu": "success"}, True), ({"cpu": "failure"}, False), ({"cpu": "cancelled"}, False),
        ({"cpu": "skipped"}, False), ({}, False),
    ],
)  # fmt: skip
def test_a_stage_starts_after_success_only(root: Path, results: dict[str, str], start: bool) -> None:
    """Fault H5: the documented gate was not the real one, since a skipped stage had not failed."""
    plan = make_plan(read_project(root), today=TODAY)
    assert {job.stage for job in plan.jobs} == {"cpu", "one-gpu"}
    assert may_start(plan, "one-gpu", results)[0] is start
    assert may_start(plan, "cpu", {})[0]


def test_a_stage_that_was_skipped_because_nothing_is_planned_in_it_holds_nothing_up(root: Path) -> None:
    plan = planned(root)
    assert may_start(plan, "one-gpu", {"cpu": "skipped"}) == (
        True,
        "every stage before it succeeded or has nothing planned",
    )
    assert may_start(plan, "one-gpu", {"cpu": "failure"})[0] is False
    assert may_start(plan, "several", {"cpu": "skipped", "one-gpu": "success"}) == (
        False,
        "not tested: the plan has no job in this stage",
    )
    assert may_start(replace(plan, problems=("expired",)), "one-gpu", {})[0] is False
    with pytest.raises(LanesError, match="unknown results"):
        may_start(plan, "one-gpu", {"cpu": "succes"})


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ('{"one-gpu-nvidia": "success", "one-gpu-amd": "skipped"}', {"one-gpu": "success"}),
        ('{"one-gpu-nvidia": {"result": "success"}, "one-gpu-amd": {"result": "failure"}}', {"one-gpu": "failure"}),
        ('{"one-gpu-nvidia": "skipped", "one-gpu-amd": "skipped", "plan": "success"}', {"one-gpu": "skipped"}),
        ('{"cpu": "success", "one-gpu-nvidia": "cancelled"}', {"cpu": "success", "one-gpu": "cancelled"}),
    ],
)
def test_the_worst_of_a_stages_jobs_counts(needs: str, expected: dict[str, str]) -> None:
    assert read_results(needs, ("cpu", "one-gpu", "several")) == expected


def test_the_gate_reads_githubs_needs(root: Path) -> None:
    lanes(root, "plan", "--no-collect", "--out", "plan.json")
    for result, start in (("success", "true"), ("failure", "false")):
        needs = (
            f'{{"plan": {{"result": "success", "outputs": {{}}}}, "cpu": {{"result": "{result}", "outputs": {{}}}}}}'
        )
        code, out, _ = lanes(root, "gate", "--plan", "plan.json", "--stage", "one-gpu", "--results", needs)
        assert (code, out) == (0, f"start={start}\n")
    assert lanes(root, "gate", "--plan", "plan.json", "--stage", "one-gpu", "--results", "success")[0] == 2


# --- status, debt, coverage -------------------------------------------------------------------------------------------


def test_status_says_what_ran_never_ran_and_is_disabled_since_when_by_whom(root: Path) -> None:
    old = a_run(tests=(passed(B, gates=(Gate("agreement", 0.01, 0.07, "at_most"),)),))
    new = a_run(started="2027-01-11T08:00:00+00:00", tests=(passed(B, outcome="failed", why="call: boom",
                gates=(Gate("agreement", 0.2, 0.07, "at_most"),)),))  # fmt: skip
    rows = {(row.subject, row.hardware): row for row in status(read_project(root), [old, new], ["tiny", "big"], TODAY)}
    assert rows["tiny", "h200"].state == "failed"
    assert (
        "2027-01-11 at cccccccccc on 1 × NVIDIA H200, 1 min: agreement 0.2 > bound 0.07" in rows["tiny", "h200"].detail
    )
    assert rows["tiny", "mi300x"].state == "never ran"
    off = rows[C, "mi300x"]
    assert off.state == "disabled"
    assert off.detail.startswith("disabled since 20")
    assert "by A Tester, expires 2027-02-01: hangs in all-to-all (#7)" in off.detail
    assert {rows["big", hardware].state for hardware in ("cpu", "h200", "mi300x", "mi350")} == {"no test"}
    (late,) = [row for row in status(read_project(root), [], [], date(2027, 2, 2)) if row.state == "expired"]
    assert late.test_id == C


def test_status_shows_the_worst_of_a_gate_that_was_taken_often() -> None:
    values = [Gate("agreement", value, 0.07, "at_most") for value in (0.01, 0.05, 0.02)]
    assert (
        gates_text([*values, Gate("reward", 0.8, 0.5, "at_least")])
        == "agreement 0.05 ≤ 0.07 (3 times), reward 0.8 ≥ 0.5"
    )
    failed = Gate("refit loaded", 0.0, 1.0, "held")
    assert gates_text([Gate("refit loaded", 1.0, 1.0, "held"), failed]) == "refit loaded not held (2 times)"
    assert gates_text([]) == "no gate recorded"


def test_a_skipped_run_is_no_run(root: Path) -> None:
    rows = status(read_project(root), [a_run(tests=(passed(B, outcome="skipped"),))], [], TODAY)
    assert {row.state for row in rows if row.test_id == B} == {"never ran"}


def texts(root: Path, runs: list[Run], kind: str, recipes: tuple[str, ...] = ()) -> list[str]:
    return [one.text for one in debt(read_project(root), runs, recipes, TODAY) if one.kind == kind]


def test_debt_lists_disabled_never_run_and_orphaned(root: Path) -> None:
    plant(root, {
        "lanes.toml": (root / "lanes.toml").read_text(),
        "mine/lost.py": "", "mine/used.py": "", "tests/test_u.py": "import mine.used\ndef test_u(): pass\n",
        "mine/test_elsewhere.py": "def test_x(): pass\n", "tests/check_y.py": "def test_y(): pass\n",
    })  # fmt: skip
    assert texts(root, [], "disabled") == [
        line for line in texts(root, [], "disabled") if "test_c [mi300x]: disabled since" in line
    ]
    assert [line.partition(":")[2] for line in texts(root, [a_run()], "never run")] == [
        ":test_b [mi300x]: no evidence of a run"
    ]
    orphaned = texts(root, [], "orphaned", ("tiny", "big"))
    for says in (
        "lanes.toml: label replay has no test",
        "lanes.toml: lane night has no test",
        "lanes.toml: runner mi350-4 has no test for mi350",
        "recipe big has no test that declares it",
        "mine/test_elsewhere.py: a test file outside of test_paths (tests), which no lane collects",
        "tests/check_y.py: has tests, and its name is not test_*.py: no lane collects it",
        "mine/lost.py: no test imports it, directly or through others",
    ):
        assert says in orphaned
    assert not any("mine/used.py" in line or "recipe tiny" in line for line in orphaned)


def test_debt_lists_flaky_tests_alarms_and_left_overs(root: Path) -> None:
    spike = Gate("agreement", 0.01, 0.07, "at_most", (50.0,))
    runs = [
        a_run(tests=(passed(B, num_retries=2), passed(C, outcome="failed"))),
        a_run(
            started="2027-01-11T08:00:00+00:00",
            tests=(passed(B, gates=(spike,), left=("process 7: sleep",)), passed(C)),
        ),
    ]
    assert texts(root, runs, "flaky") == [
        f"{B} [h200]: retried 2 times",
        f"{C} [h200]: passed and failed at cccccccccc",
    ]
    assert texts(root, runs, "gates") == [f"{B} [h200]: agreement has 1 outliers to 50"]
    assert texts(root, runs, "left behind") == [f"{B} [h200]: process 7: sleep"]


def test_debt_lists_estimates_that_the_evidence_contradicts(root: Path) -> None:
    (line,) = texts(root, [a_run(tests=(passed(B, minutes=2.0), passed(C, minutes=4.0)))], "mis-estimated")
    assert line == "tests/test_b.py:4: minutes=5, measured 2 min on h200 over 1 run: write minutes=2"


def test_debt_lists_gates_that_only_one_vendor_records(root: Path) -> None:
    def gates(*names: str) -> tuple[Gate, ...]:
        return tuple(Gate(name, 0.0, 1.0, "at_most") for name in names)

    runs = [a_run(tests=(passed(B, gates=gates("agreement", "reward")),)),
            a_run(hardware="mi300x", vendor="rocm", tests=(passed(B, gates=gates("agreement")),))]  # fmt: skip
    assert texts(root, runs, "gates") == [f"{B}: reward recorded elsewhere and not on rocm"]


def test_coverage_counts_declared_enabled_and_passed(root: Path) -> None:
    project = read_project(root)
    assert coverage(project, []) == {
        "h200": {"declared": 2, "enabled": 2, "passed": 0},
        "mi300x": {"declared": 2, "enabled": 1, "passed": 0},
        "mi350": {"declared": 0, "enabled": 0, "passed": 0},
    }
    block = coverage_block(project, [a_run(tests=(passed(B), passed(C, outcome="failed")))])
    assert "| h200 | 2 | 2 | 1 | 50 % |" in block
    assert "| mi300x | 2 | 1 | 0 | 0 % |" in block
    assert "| mi350 | 0 | 0 | 0 | no test |" in block
    old = "before\n" + coverage_block(project, []) + "\nafter\n"
    assert replace_block(old, block) == f"before\n{block}\nafter\n"
    with pytest.raises(LanesError, match="no coverage block"):
        replace_block("nothing here", block)


def test_evidence_survives_writing_and_what_is_no_evidence_is_refused(tmp_path: Path) -> None:
    run = a_run(tests=(passed(B, gates=(Gate("x", math.inf, 1.0, "at_most", (2.0,)),), left=("a",)),))
    paths = [write_run(run, tmp_path) for _ in range(3)]
    assert len(set(paths)) == 3
    assert read_run(paths[0]) == run
    assert read_runs([tmp_path, tmp_path / "absent"]) == [run] * 3
    paths[0].write_text('{"schema": 1, "tests": [{"gates": 3}]}')
    with pytest.raises(LanesError, match="is not the evidence of a run"):
        read_run(paths[0])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"outcome": "passed"', '"outcome": "PASSED"'),
        ('"exit_status": 0', '"exit_status": "0"'),
        ('"started": "2027-01-10T08:00:00+00:00"', '"started": "2027-01-10"'),
        ('"sense": "at_most"', '"sense": "below"'),
        ('"minutes": 1.0', '"minutes": NaN'),
    ],
)
def test_a_value_that_no_run_writes_is_refused(tmp_path: Path, old: str, new: str) -> None:
    """An outcome that is not known would be neither failed nor skipped, and so count as done."""
    path = write_run(a_run(tests=(passed(B, gates=(Gate("x", 0.5, 1.0, "at_most"),)),)), tmp_path)
    assert read_run(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(LanesError, match="is not the evidence of a run"):
        read_run(path)


def test_every_file_that_is_cut_off_is_named_at_once(tmp_path: Path) -> None:
    paths = [write_run(a_run(), tmp_path) for _ in range(3)]
    for path in paths[:2]:
        path.write_text(path.read_text()[:100])
    with pytest.raises(LanesError) as error:
        read_runs([tmp_path])
    assert len(error.value.problems) == 2
