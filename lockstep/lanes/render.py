"""Plan, status and debt as text for people; ``--json`` has all of it for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.lanes.debt import KINDS, Debt
from lockstep.lanes.plan import Plan
from lockstep.lanes.status import Row


def render_plan(plan: Plan, *, verbose: bool = False) -> str:
    """Jobs with their tests and reasons, what is skipped and why, notes and problems.

    Tests of one file with one reason share a line, unless ``verbose``.
    """
    asked = [f"labels {', '.join(plan.labels)}"] if plan.labels else []
    asked += [f"changed since {plan.changed_since}"] if plan.changed_since else []
    lines = [f"plan of {plan.commit}: {'; '.join(asked) or 'everything but nightly'}"]
    for job in plan.jobs:
        machine = f"{job.num_gpus} × {job.hardware}" if job.num_gpus else job.hardware
        lines += [
            "",
            f"{job.stage} · {job.lane} · {machine} · runner {job.runner} · shard {job.shard} · {job.minutes:.1f} min",
        ]
        lines += _grouped([(test_id, reason) for test_id, _, reason in job.tests], "+", verbose)
    if plan.skipped:
        lines += ["", f"skipped: {len(plan.skipped)}"]
        lines += _grouped(
            [(f"{test_id} [{hardware}]", reason) for test_id, hardware, reason in plan.skipped], "-", verbose
        )
    lines += ["", "notes"] * bool(plan.notes) + [f"  · {note}" for note in plan.notes]
    lines += ["", f"problems: {len(plan.problems)}"] * bool(plan.problems) + [f"  ! {text}" for text in plan.problems]
    num_tests = sum(len(job.tests) for job in plan.jobs)
    red = "red" if plan.problems else "ready"
    return "\n".join([*lines, "", f"{red}: {num_tests} tests in {len(plan.jobs)} jobs, {len(plan.skipped)} skipped"])


def _grouped(entries: Sequence[tuple[str, str]], sign: str, verbose: bool) -> Iterable[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in entries:
        path, _, rest = name.partition("::")
        groups.setdefault((path, reason), []).append(rest)
    for (path, reason), names in groups.items():
        if verbose or len(names) == 1:
            yield from (f"  {sign} {path}::{name}: {reason}" for name in names)
        else:
            yield f"  {sign} {path}: {len(names)} tests: {reason}"


def render_status(rows: Sequence[Row]) -> str:
    """A paragraph for each recipe or test, a line for each hardware."""
    lines: list[str] = []
    for subject in dict.fromkeys(row.subject for row in rows):
        lines.append(subject)
        lines += [f"  {row.hardware:8} {row.state:9}  {row.detail}" for row in rows if row.subject == subject]
    return "\n".join(lines or ["no test is declared and no recipe is known"])


def render_debt(found: Sequence[Debt]) -> str:
    """A paragraph for each kind."""
    lines: list[str] = []
    for kind in KINDS:
        own = [one.text for one in found if one.kind == kind]
        lines += [f"{kind}: {len(own)}", *(f"  {text}" for text in own)]
    return "\n".join(lines)
