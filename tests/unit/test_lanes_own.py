"""Lockstep's own lanes: the plan has no problem, layouts are judged at planning, and the README's number is fresh."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from lockstep.lanes import Case
from lockstep.lanes.evidence import read_runs
from lockstep.lanes.plan import Project, make_plan, read_project
from lockstep.lanes.status import BEGIN, END, coverage_block
from lockstep.lanes_layout import check, settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project() -> Project:
    return read_project(ROOT)


def test_the_plan_has_no_problem(project: Project) -> None:
    plan = make_plan(project, today=date.today())  # an expired disable has to fail here too
    assert plan.problems == ()
    assert {job.hardware for job in plan.jobs} >= {"cpu", "h100", "h200", "mi300x", "mi350"}


def test_tests_of_vllm_and_of_gpus_are_declared(project: Project) -> None:
    undeclared = {
        case.path for case in project.cases if case.path.startswith(("tests/vllm/", "tests/gpu/")) and not case.declared
    }
    assert undeclared == set()


def test_the_readmes_coverage_is_what_the_evidence_says(project: Project) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = BEGIN + text.partition(BEGIN)[2].partition(END)[0] + END
    runs = read_runs([ROOT / project.catalogue.evidence])
    assert shown == coverage_block(project, runs), "run: .venv/bin/lockstep lanes coverage --write README.md"


def test_evidence_in_the_repository_is_of_real_devices(project: Project) -> None:
    for run in read_runs([ROOT / project.catalogue.evidence]):
        num_gpus = project.catalogue.lanes[run.lane].num_gpus
        assert len(run.devices) >= num_gpus
        assert run.tests, "a run of nothing is no evidence"


def a_case(recipe: str | None, layout: dict[str, object], num_gpus: int = 4, overlay: str | None = None) -> Case:
    return Case("tests/test_a.py::test_a", "tests/test_a.py:1", "four", "several", "cuda", "h200", num_gpus, 5,
                recipe=recipe, layout=layout, overlay=overlay)  # fmt: skip


def test_an_illegal_grid_is_refused_at_planning_with_the_numbers() -> None:
    assert check(a_case("tiny-qwen3-moe", {})) == []
    assert check(a_case("qwen3-30b-a3b-5layer", {})) == []
    found = check(a_case("qwen3-30b-a3b-5layer", {"cluster.gpus_per_node": 4, "trainer.layout.ep": 3}))
    assert "expert-grid: etp 1 · ep 3 · pp 1 = 3 does not divide world 4" in found[0]
    (few,) = check(a_case("tiny-qwen3-moe", {"cluster.gpus_per_node": 8, "cluster.hardware": "h200"}))[-1:]
    assert few == "recipe tiny-qwen3-moe needs 8 devices, lane four has 4"


def test_what_no_recipe_knows_is_refused() -> None:
    assert "there is no recipe" in check(a_case("tiny-qwen4", {}))[0]
    assert "ep" in check(a_case("tiny-qwen3-moe", {"trainer.layout.epp": 2}))[0]
    assert check(a_case(None, {"trainer.layout.ep": 2})) == ["layout is given without a recipe that it would change"]
    assert check(a_case(None, {})) == []


def test_a_layout_becomes_settings_of_the_run() -> None:
    case = a_case("x", {"trainer.layout.ep": 4, "rollout.engine": "vllm", "cluster.colocated": True})
    assert settings(case) == ["trainer.layout.ep=4", "rollout.engine=vllm", "cluster.colocated=true"]
