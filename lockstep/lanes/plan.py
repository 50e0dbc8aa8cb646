"""The plan: what runs where, in which shard and why; what is left out and why; and everything that makes it red.

::

    source of the tests ─ read ─┐
    lanes.toml ─ catalogue ─────┼─ cases ─ select ─ decisions ─┬─ by stage, lane, hardware ─ shards ─ jobs ─┐
    git ─ changes ──────────────┘                              └─ skipped, with reasons ───────────────────┼─ Plan
    today, machines online, layout check, collection ─ decay ─ problems ───────────────────────────────────┘
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from lockstep.lanes import decay
from lockstep.lanes.catalogue import Catalogue, load_catalogue
from lockstep.lanes.changes import changed_files, git, reached_tests
from lockstep.lanes.collect import Collection
from lockstep.lanes.declare import Case, FoundTest
from lockstep.lanes.errors import LanesError
from lockstep.lanes.files import load_function
from lockstep.lanes.history import History, drifts, load_history
from lockstep.lanes.read import read_tests
from lockstep.lanes.select import Decision, Request, all_cases, select
from lockstep.lanes.shards import num_shards_for, split

SCHEMA = 1
UNKNOWN = "unknown"
"""Commit of a tree that git can't tell."""


@dataclass(frozen=True, slots=True)
class Job:
    """One shard on one machine: what a workflow's matrix starts. ``shard``: ``1/3``. ``runs_on``: the labels asked for.

    ``tests``: (test id, minutes, reason). ``minutes`` of them all; ``limit_minutes`` after which the job is ended.
    """

    stage: str
    lane: str
    hardware: str
    vendor: str
    num_gpus: int
    runner: str
    runs_on: tuple[str, ...]
    image: str
    dockerfile: str
    family: str
    setup: str
    python: str
    shard: str
    minutes: float
    limit_minutes: float
    tests: tuple[tuple[str, float, str], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """``skipped``: (test id, hardware, reason). ``problems`` make it red; ``notes`` are for reading."""

    commit: str
    labels: tuple[str, ...]
    changed_since: str | None
    stages: tuple[str, ...]
    jobs: tuple[Job, ...]
    skipped: tuple[tuple[str, str, str], ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def to_json(self) -> str:
        """The plan as one JSON object."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    @classmethod
    def read(cls, path: Path) -> Plan:
        """A plan from its file. Raises ``LanesError``."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LanesError(f"{path} can't be read as a plan: {error}") from None
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls, text: str, where: str) -> Plan:
        """A plan that ``to_json`` wrote. Raises ``LanesError``."""
        try:
            table: dict[str, Any] = json.loads(text)
            if table.pop("schema") != SCHEMA:
                raise LanesError(f"{where} was written by another version of lanes; plan anew")
            jobs = tuple(
                Job(
                    **(
                        job
                        | {"runs_on": tuple(job["runs_on"]), "tests": tuple((t[0], t[1], t[2]) for t in job["tests"])}
                    )
                )
                for job in table.pop("jobs")
            )
            lists = {name: tuple(table.pop(name)) for name in ("labels", "stages", "problems", "notes")}
            skipped = tuple((one[0], one[1], one[2]) for one in table.pop("skipped"))
            return cls(jobs=jobs, skipped=skipped, **lists, **table)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise LanesError(f"{where} is not a plan of lanes: {error!r}") from None


@dataclass(frozen=True, slots=True)
class Project:
    """A project's tests, cases and catalogue as read from its root, with everything wrong in the marks."""

    root: Path
    catalogue: Catalogue
    tests: tuple[FoundTest, ...]
    cases: tuple[Case, ...]
    problems: tuple[str, ...]
    history: History


def read_project(root: Path) -> Project:
    """Read a project from its root. Raises ``LanesError`` for a catalogue or history that can't be used."""
    catalogue = load_catalogue(root)
    tests, problems = read_tests(root, catalogue.test_paths)
    runnable = [test for test in tests if test.never_collected is None]
    cases = tuple(all_cases(runnable, catalogue))
    return Project(root, catalogue, tuple(tests), cases, tuple(problems), load_history(root / catalogue.history))


def make_plan(
    project: Project,
    *,
    labels: Sequence[str] = (),
    changed_since: str | None = None,
    stages: Sequence[str] = (),
    today: date,
    online: Sequence[frozenset[str]] | None = None,
    collection: Collection | None = None,
) -> Plan:
    """Plan a project. ``online``: labels of each machine that answers. ``collection``: what pytest finds (``collect``).

    Raises ``LanesError`` for a label, stage or commit that is not known.
    """
    catalogue = project.catalogue
    changed = None
    if changed_since is not None:
        changed = reached_tests(project.root, catalogue, changed_files(project.root, changed_since))
    decisions = select(project.cases, catalogue, Request(tuple(labels), changed, tuple(stages)))
    jobs, unplaced = _jobs([one for one in decisions if one.selected], catalogue, project.history)
    problems = [*project.problems, *decay.check_declarations(project.tests, catalogue, today)]
    problems += decay.check_runners(project.cases, catalogue, online)
    problems += decay.check_vendors(project.cases)
    problems += [*check_layouts(project), *unplaced, *(collection.problems if collection else ())]
    if not jobs:
        problems.append("not tested: nothing was selected; name tests in always_run if a change may select none")
    skipped = tuple((one.case.test_id, one.case.hardware, one.reason) for one in decisions if not one.selected)
    return Plan(
        commit=commit_of(project.root),
        labels=tuple(labels),
        changed_since=changed_since,
        stages=catalogue.stages,
        jobs=tuple(jobs),
        skipped=skipped,
        problems=tuple(problems),
        notes=(
            *drifts(project.cases, project.history),
            *_empty_stages(jobs, decisions, catalogue),
            *(collection.notes if collection else ()),
        ),
    )


def check_layouts(project: Project) -> list[str]:
    """What the catalogue's ``layout_check`` says of every enabled case, on this machine's CPU."""
    spec = project.catalogue.layout_check
    if spec is None:
        return []
    declared = [case for case in project.cases if case.declared]
    return decay.check_layouts(declared, load_function(spec, project.root))


def commit_of(root: Path) -> str:
    """The commit checked out, with ``+changes`` if the tree differs; ``UNKNOWN`` outside git."""
    try:
        commit = git(root, "rev-parse", "HEAD").strip()
        return f"{commit}+changes" if git(root, "status", "--porcelain", "--untracked-files=no").strip() else commit
    except LanesError:
        return UNKNOWN


def _jobs(chosen: Sequence[Decision], catalogue: Catalogue, history: History) -> tuple[list[Job], list[str]]:
    groups: dict[tuple[str, str], list[Decision]] = {}
    for one in chosen:
        groups.setdefault((one.case.lane, one.case.hardware), []).append(one)
    order = {stage: index for index, stage in enumerate(catalogue.stages)}
    jobs: list[Job] = []
    problems: list[str] = []
    for (lane_name, hardware), group in sorted(groups.items(), key=lambda g: (order[g[1][0].case.stage], g[0])):
        lane = catalogue.lanes[lane_name]
        runners = catalogue.runners_for(hardware, lane.num_gpus)
        if not runners:
            continue  # check_runners has said so
        runner = catalogue.runners[runners[0]]
        image = catalogue.images.get(runner.image or "")
        minutes = {one.case.test_id: history.minutes(one.case) for one in group}
        reasons = {one.case.test_id: one.reason for one in group}
        num_shards = num_shards_for(list(minutes.values()), lane.target_minutes, lane.max_shards)
        for index, names in enumerate(split(minutes, num_shards)):
            total = sum(minutes[name] for name in names)
            if total > lane.limit_minutes:
                problems.append(
                    f"lane {lane_name} on {hardware}: shard {index + 1}/{num_shards} takes {total:.0f} min, but a job "
                    f"ends after {lane.limit_minutes:g}; raise max_shards or limit_minutes"
                )
            jobs.append(
                Job(
                    stage=lane.stage, lane=lane_name, hardware=hardware, vendor=catalogue.vendor(hardware),
                    num_gpus=lane.num_gpus, runner=runners[0], runs_on=runner.labels,
                    image=image.reference if image else "", dockerfile=image.dockerfile if image else "",
                    family=image.family if image else "",
                    setup=lane.setup, python=lane.python,
                    shard=f"{index + 1}/{num_shards}", minutes=round(total, 2), limit_minutes=lane.limit_minutes,
                    tests=tuple((name, round(minutes[name], 3), reasons[name]) for name in sorted(names)),
                )
            )  # fmt: skip
    return jobs, problems


def _empty_stages(jobs: Sequence[Job], decisions: Sequence[Decision], catalogue: Catalogue) -> list[str]:
    """Stages that have tests of which none was selected: that they are not tested is said, not left to a green tick."""
    busy, known = {job.stage for job in jobs}, {one.case.stage for one in decisions}
    return [
        f"not tested: stage {stage} has tests, none selected" for stage in catalogue.stages if stage in known - busy
    ]


def matrix(plan: Plan, stage: str, vendors: Sequence[str] = ()) -> list[Mapping[str, Any]]:
    """The jobs of a stage as a workflow's matrix. Raises ``LanesError`` for an unknown stage."""
    if stage not in plan.stages:
        raise LanesError(f"unknown stage {stage}; known: {', '.join(plan.stages)}")
    wanted = [job for job in plan.jobs if job.stage == stage and (not vendors or job.vendor in vendors)]
    keep = ("lane", "hardware", "num_gpus", "runs_on", "image", "dockerfile", "family", "setup", "python", "shard")
    return [
        {
            "name": f"{job.lane}-{job.hardware}-{job.shard.replace('/', 'of')}",
            **{name: value for name, value in asdict(job).items() if name in keep},
            "limit_minutes": math.ceil(job.limit_minutes),
        }
        for job in wanted
    ]
