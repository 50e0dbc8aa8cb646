"""May a stage start, and did what was planned really run? Both are asked after skipped and cancelled jobs too.

A job that was skipped is neither a success nor a failure, and workflow languages differ in what they make of it. Here:
a stage starts if each stage before it either succeeded, or was skipped because the plan has no job in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from lockstep.lanes.errors import LanesError
from lockstep.lanes.evidence import Run
from lockstep.lanes.plan import Plan

RESULTS = ("success", "failure", "cancelled", "skipped")


def may_start(plan: Plan, stage: str, results: Mapping[str, str]) -> tuple[bool, str]:
    """Whether a stage may start, given the results of the stages before it, and why.

    Raises ``LanesError`` for an unknown stage or result.
    """
    if stage not in plan.stages:
        raise LanesError(f"unknown stage {stage}; known: {', '.join(plan.stages)}")
    wrong = {name: result for name, result in results.items() if result not in RESULTS}
    if wrong:
        raise LanesError(f"unknown results {wrong}; known: {', '.join(RESULTS)}")
    if plan.problems:
        return False, f"the plan is red: {plan.problems[0]}"
    busy = {job.stage for job in plan.jobs}
    for earlier in plan.stages[: plan.stages.index(stage)]:
        result = results.get(earlier, "skipped")
        if result == "success" or (result == "skipped" and earlier not in busy):
            continue
        return False, f"stage {earlier} before it: {result}"
    if stage not in busy:
        return False, "not tested: the plan has no job in this stage"
    return True, "every stage before it succeeded or has nothing planned"


def check_runs(plan: Plan, runs: Sequence[Run]) -> list[str]:
    """What was planned and did not run, ran twice, ran elsewhere, skipped itself or failed. Empty: it is green."""
    of_commit = [run for run in runs if run.commit.removesuffix("+changes") == plan.commit.removesuffix("+changes")]
    problems = [f"the plan is red: {text}" for text in plan.problems]
    if not plan.jobs:
        problems.append("not tested: the plan has no job")
    for job in plan.jobs:
        where = f"{job.lane} on {job.hardware}, shard {job.shard}"
        own = [run for run in of_commit if (run.lane, run.hardware, run.shard) == (job.lane, job.hardware, job.shard)]
        if not own:
            problems.append(f"{where}: never ran, though {len(job.tests)} tests were planned")
            continue
        run = own[-1]  # a job that was started again replaces its first run
        if run.exit_status:
            problems.append(f"{where}: pytest ended with {run.exit_status}")
        outcomes = Counter(result.test_id for result in run.tests)
        by_id = {result.test_id: result for result in run.tests}
        for test_id, _, _ in job.tests:
            result = by_id.get(test_id)
            if result is None:
                problems.append(f"{where}: {test_id} was planned and did not run")
            elif result.outcome == "failed":
                problems.append(f"{where}: {test_id} failed: {result.why}")
            problems += [
                f"{where}: {test_id}: gate {gate.text()}"
                for gate in (result.gates if result and result.outcome == "passed" else ())
                if not gate.passed
            ]
        problems += [f"{where}: {name} ran {count} times" for name, count in outcomes.items() if count > 1]
    problems += _in_two_shards(plan, of_commit)
    return problems


def _in_two_shards(plan: Plan, runs: Sequence[Run]) -> list[str]:
    latest = {(run.lane, run.hardware, run.shard): run for run in runs}
    planned = {(job.lane, job.hardware, job.shard) for job in plan.jobs}
    seen: dict[tuple[str, str, str], list[str]] = {}
    for key, run in latest.items():
        if key in planned:
            for result in run.tests:
                seen.setdefault((run.lane, run.hardware, result.test_id), []).append(run.shard)
    return [
        f"{lane} on {hardware}: {test_id} ran in shards {', '.join(sorted(shards))}"
        for (lane, hardware, test_id), shards in sorted(seen.items())
        if len(shards) > 1
    ]
