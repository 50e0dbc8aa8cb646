"""A plan is red for every kind of decay, names its place and the way out, and never has an illegal layout in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import pytest

from lockstep.lanes import LanesError
from lockstep.lanes.collect import run_collection
from lockstep.lanes.plan import Plan, make_plan, matrix, read_project
from tests.unit.lanes_planted import CATALOGUE, HEAD, commit, lanes, lanes_json, mark, plant

TODAY = date(2027, 1, 15)
OK = {"tests/test_a.py": "def test_a(): pass\n"}
NO_RUNNER = "\n".join(line for line in CATALOGUE.splitlines() if not line.startswith("h200-4 "))


def plan(root: Path, **more: object) -> Plan:
    return make_plan(read_project(root), today=TODAY, **more)  # type: ignore[arg-type]


def problems(root: Path, text: str, catalogue: str = CATALOGUE, **more: object) -> tuple[str, ...]:
    return plan(plant(root, {**OK, "tests/test_b.py": HEAD + text}, catalogue), **more).problems


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (mark("on"), "asks for the unknown lane on; known: cpu, cpu-long, one"),
        (mark(hardware='{"cuda": "h300"}'), "asks for the unknown hardware h300; known: cpu, h200"),
        (mark(hardware='{"rocm": "h200"}'), "names h200 under rocm, but it is cuda"),
        (mark(hardware='{"cpu": "cpu"}'), "asks for cpu in lane one, which has 1 GPUs"),
        (mark("cpu-long"), "asks for h200 in lane cpu-long, which has 0 GPUs"),
        (mark(more='labels=["reply"]'), "has the unknown label reply; known: run-amd"),
        (mark(more='labels=["run-amd"]'), "carries label run-amd, which picks machines, not tests"),
        (mark(more='extra_env={"amd": {"X": "1"}}'), "has extra_env for amd, which it does not run on"),
        (mark(minutes=95), "takes 95 min, but a job of lane one ends after 90"),
    ],
)
def test_a_mark_that_does_not_fit_makes_the_plan_red(tmp_path: Path, text: str, says: str) -> None:
    found = problems(tmp_path, text + "def test_b(): pass\n")
    assert len([one for one in found if says in one]) == 1
    assert any(one.startswith("tests/test_b.py:4: test_b ") for one in found)


def test_a_plan_without_decay_is_ready(tmp_path: Path) -> None:
    assert problems(tmp_path, mark() + "def test_b(): pass\n") == ()


def test_an_expired_disable_fails_the_plan(tmp_path: Path) -> None:
    off = 'disabled={"cuda": Disabled(reason="hangs", issue="#7", expires="%s")}'
    both = '{"cuda": "h200", "rocm": "mi300x"}'
    (expired,) = problems(
        tmp_path, mark("one", both, more=off % "2027-01-14") + "def test_b(): pass\n" + mark() + "def test_c(): pass\n"
    )
    assert "test_b is disabled on cuda since before 2027-01-14, which has passed: hangs (#7)" in expired
    assert (
        problems(
            tmp_path,
            mark("one", both, more=off % "2027-01-15") + "def test_b(): pass\n" + mark() + "def test_c(): pass\n",
        )
        == ()
    )


def test_a_vendor_whose_every_case_is_disabled_is_red(tmp_path: Path) -> None:
    off = 'disabled={"rocm": Disabled("hangs", "#7", "2028-01-01")}'
    text = "".join(
        mark("one", '{"cuda": "h200", "rocm": "mi300x"}', more=off) + f"def test_{n}(): pass\n" for n in "bc"
    )
    (found,) = problems(tmp_path, text)
    assert found.startswith("all 2 cases on rocm are disabled, so nothing runs there")


def test_a_registered_test_that_pytest_would_not_collect_is_red(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, mark() + "def check_b(): pass\n")
    assert "is registered and never runs: its name does not begin with test: check_b" in found


def test_the_command_asks_pytest_itself(tmp_path: Path) -> None:
    text = HEAD + mark() + "def test_gone(): pass\ndel test_gone\n"
    engine = HEAD + "import no_such_engine\n" + mark("one") + "def test_b(): pass\n"
    cpu = HEAD + "import no_such_engine\n" + mark("cpu-long", '{"cpu": "cpu"}') + "def test_c(): pass\n"
    root = plant(tmp_path, {**OK, "tests/test_g.py": text, "tests/test_e.py": engine, "tests/test_c.py": cpu})
    code, out, _ = lanes(root, "plan")
    assert code == 1
    assert "tests/test_g.py:4: tests/test_g.py::test_gone is registered and pytest collected nothing of it" in out
    assert "· tests/test_e.py can't be collected on this machine, its lane checks it" in out
    assert "tests/test_c.py::test_c is registered for a CPU, and its file can't be collected" in out
    assert "problems: 2" in out


def test_a_folder_that_can_not_be_imported_hides_no_other_and_a_lanes_own_interpreter_is_used(tmp_path: Path) -> None:
    gone = HEAD + mark() + "def test_gone(): pass\ndel test_gone\n"
    fine = HEAD + mark("cpu-long", '{"cpu": "cpu"}') + "def test_fine(): pass\n"
    files = {
        "tests/engine/conftest.py": "import no_such_engine\n",
        "tests/engine/test_e.py": fine,
        "tests/test_g.py": gone,
    }
    root = plant(
        tmp_path, files, CATALOGUE.replace("[lanes.cpu-long]", '[lanes.cpu-long]\npython = ".venv/bin/python"')
    )
    lines = lanes(root, "plan")[1].splitlines()
    assert [line for line in lines if line.startswith("  ! ")] == [
        "  ! tests/test_g.py:4: tests/test_g.py::test_gone is registered and pytest collected nothing of it"
    ]
    assert any(
        "tests/engine/test_e.py can't be collected" in x and ".venv/bin/python is not installed" in x for x in lines
    )


def test_a_lane_whose_runners_are_missing_is_red(tmp_path: Path) -> None:
    text = mark("four") + "def test_b(): pass\n"
    (absent,) = problems(tmp_path, text, NO_RUNNER)
    assert absent == "lanes.toml: lane four has 1 test for h200 and no runner with 4 × h200; add one"
    online = [frozenset({"ubuntu-24.04", "x"}), frozenset({"self-hosted", "h200-1"})]
    (offline,) = problems(tmp_path, text, online=online)
    assert offline == "lane four: 1 test for h200, and no machine of h200-4 is online"
    assert problems(tmp_path, text, online=[*online, frozenset({"self-hosted", "h200-4", "linux"})]) == ()


def test_the_command_reads_githubs_list_of_runners(tmp_path: Path) -> None:
    root = plant(tmp_path, {"tests/test_a.py": HEAD + mark() + "def test_a(): pass\n"})
    entry = {"status": "offline", "labels": [{"name": "self-hosted"}, {"name": "h200-1"}]}
    (root / "runners.json").write_text(json.dumps({"runners": [entry]}))
    code, out, _ = lanes(root, "plan", "--no-collect", "--online", "runners.json")
    assert code == 1
    assert "no machine of h200-1, h200-4 is online" in out
    (root / "runners.json").write_text("[]")
    code, _, err = lanes(root, "plan", "--no-collect", "--online", "runners.json")
    assert (code, "is not GitHub's list of runners" in err) == (2, True)


def test_steps_time_and_checks_have_to_agree(tmp_path: Path) -> None:
    """Fault H9: 200 steps did not fit the limit, so the check of the last step could never pass."""
    (late,) = problems(tmp_path, mark(minutes=60, more='run={"num_steps": 200, "step_s": 60}') + "def test_b(): pass\n")
    assert "can't reach step 200: 200 steps of 60 s take 200 min, and minutes=60" in late
    (beyond,) = problems(tmp_path, mark(more='run={"num_steps": 20, "checked_at_step": 21}') + "def test_b(): pass\n")
    assert "checks step 21 of a run of 20" in beyond
    fits = 'run={"num_steps": 60, "step_s": 60, "checked_at_step": 60}'
    assert problems(tmp_path, mark(minutes=60, more=fits) + "def test_b(): pass\n") == ()


def test_an_empty_selection_is_not_tested_and_never_green(tmp_path: Path) -> None:
    """Fault H4: a run with an empty scope of labels covered almost nothing and was green."""
    root = plant(tmp_path, {"tests/test_a.py": HEAD + mark(more='labels=["replay"]') + "def test_a(): pass\n"})
    made = plan(root, labels=["megatron"])
    assert made.jobs == ()
    assert made.problems[0].startswith("not tested: nothing was selected")
    assert "not tested: stage one-gpu has tests, none selected" in made.notes
    assert lanes(root, "plan", "--no-collect", "--labels", "megatron")[0] == 1


def check_grid(case: object) -> Sequence[str]:
    """A planted layout rule."""
    layout = getattr(case, "layout", {})
    world = getattr(case, "num_gpus", 0)
    return [f"expert = {layout['expert']} does not divide {world} GPUs"] if world % layout.get("expert", 1) else []


def test_an_illegal_layout_never_reaches_a_machine(tmp_path: Path) -> None:
    catalogue = CATALOGUE.replace("[lanes.cpu]\n", "[lanes.cpu]\n", 1)
    catalogue = 'layout_check = "tests.unit.test_lanes_plan:check_grid"\n' + catalogue
    text = mark("four", '{"cuda": "h200", "rocm": "mi350"}', more='layout={"*": {"expert": 4}, "rocm": {"expert": 3}}')
    (found,) = problems(tmp_path, text + "def test_b(): pass\n", catalogue)
    assert found == "tests/test_b.py:4: tests/test_b.py::test_b on mi350: expert = 3 does not divide 4 GPUs"


def test_a_layout_check_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(LanesError, match=r"tests\.unit\.test_lanes_plan has no function nothing"):
        problems(tmp_path, "", 'layout_check = "tests.unit.test_lanes_plan:nothing"\n' + CATALOGUE)


def test_jobs_are_placed_on_the_smallest_runner_that_fits_in_balanced_shards(tmp_path: Path) -> None:
    text = HEAD + "".join(mark(minutes=m) + f"def test_{n}(): pass\n" for n, m in enumerate([40, 20, 20, 10]))
    made = plan(plant(tmp_path, {"tests/test_b.py": text}))
    assert [(job.runner, job.shard, job.minutes) for job in made.jobs] == [
        ("h200-1", "1/3", 40.0),
        ("h200-1", "2/3", 30.0),
        ("h200-1", "3/3", 20.0),
    ]
    entries = matrix(made, "one-gpu")
    assert entries[0]["runs_on"] == ("self-hosted", "h200-1")
    assert [entry["name"] for entry in entries] == ["one-h200-1of3", "one-h200-2of3", "one-h200-3of3"]
    assert entries[0]["family"] == "sm90"
    assert entries[0]["dockerfile"] == "docker/Dockerfile.cuda"
    assert matrix(made, "one-gpu", ["rocm"]) == matrix(made, "cpu") == []


def test_a_shard_that_its_job_would_cut_off_is_red(tmp_path: Path) -> None:
    catalogue = CATALOGUE.replace('stage = "one-gpu"', 'stage = "one-gpu"\nmax_shards = 1')
    text = "".join(mark(minutes=60) + f"def test_{n}(): pass\n" for n in "bc")
    (found,) = problems(tmp_path, text, catalogue)
    assert "lane one on h200: shard 1/1 takes 120 min, but a job ends after 90" in found


def test_each_selected_and_each_skipped_test_has_its_reason_in_print_and_json(tmp_path: Path) -> None:
    files = {**OK, "tests/test_b.py": HEAD + mark(more='labels=["replay"]') + "def test_b(): pass\n"}
    root = commit(plant(tmp_path, files))
    (root / "tests/test_a.py").write_text("def test_a(): assert True\n")
    arguments = ("plan", "--no-collect", "--labels", "run-amd,replay", "--changed-since", "main")
    code, out, _ = lanes(root, *arguments, "--verbose")
    assert code == 0
    assert "+ tests/test_a.py::test_a: it changed" in out
    assert "- tests/test_b.py::test_b [h200]: h200 is not among what run-amd picks" in out
    table = lanes_json(root, *arguments, "--json")
    assert Plan.from_json(json.dumps(table), "x").to_json() == json.dumps(table, indent=1)
    assert table["commit"].endswith("+changes")


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 0}', '{"schema": 1}', '{"schema": 1, "jobs": [{}]}'])
def test_a_file_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(LanesError, match=r"plan\.json"):
        Plan.from_json(text, "plan.json")


def test_bad_usage_ends_with_two_and_no_traceback(tmp_path: Path) -> None:
    code, _, err = lanes(plant(tmp_path, OK), "plan", "--labels", "run-amdd")
    assert code == 2
    assert err.startswith("unknown label run-amdd; known:")


def check_badly(case: object) -> object:
    """A planted layout rule that fails in the ways in which one can."""
    layout = getattr(case, "layout", {})
    return {"text": "wrong", "none": None, "raise": []}[layout["how"]] if layout["how"] != "raise" else [][1]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("text", "the layout check returned 'wrong'; expected a list of texts"),
        ("none", "the layout check returned None; expected a list of texts"),
        ("raise", "the layout check itself failed: IndexError"),
    ],
)
def test_a_layout_check_that_gives_no_answer_makes_the_plan_red(tmp_path: Path, how: str, says: str) -> None:
    catalogue = 'layout_check = "tests.unit.test_lanes_plan:check_badly"\n' + CATALOGUE
    text = mark(more=f'layout={{"*": {{"how": "{how}"}}}}') + "def test_b(): pass\n"
    (found,) = problems(tmp_path, text, catalogue)
    assert says in found


def test_a_file_that_hangs_while_it_is_imported_does_not_hold_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.lanes.collect.LIMIT_S", 3.0)
    root = plant(tmp_path, {"tests/test_a.py": "import time\ntime.sleep(100)\n"})
    found, failed = run_collection(root, sys.executable, ["tests/test_a.py"])
    assert (found, failed) == (set(), {"tests/test_a.py": "the collection did not end within 3 s"})


def test_a_plan_is_written_into_a_folder_that_is_made(tmp_path: Path) -> None:
    root = commit(plant(tmp_path, {"tests/test_a.py": "def test_a(): pass\n"}))
    assert lanes(root, "plan", "--no-collect", "--out", "new/plan.json")[0] == 0
    assert Plan.read(root / "new/plan.json").problems == ()
