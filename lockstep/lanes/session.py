"""What one run of pytest on a lane consists of: the machine is the one named, and these tests are its shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.lanes.declare import CPU, Case
from lockstep.lanes.errors import LanesError
from lockstep.lanes.machine import VARIABLE, Machine, detect
from lockstep.lanes.plan import UNKNOWN, Plan, Project, commit_of, read_project
from lockstep.lanes.read import files_of_tests
from lockstep.lanes.shards import parse_shard, shard_of_unplanned, split


@dataclass(frozen=True, slots=True)
class Assignment:
    """``cases``: those of this shard by test id. ``elsewhere``: tests known from the source that are not in it.

    ``files``: what to collect. ``commit``: what is checked out; the plan's, if git can't be read here.
    """

    project: Project
    machine: Machine
    lane: str
    hardware: str
    shard: str
    cases: Mapping[str, Case]
    elsewhere: frozenset[str]
    files: tuple[str, ...]
    commit: str

    @property
    def declared(self) -> frozenset[str]:
        """Tests whose source shows a mark."""
        return frozenset(test.test_id for test in self.project.tests if test.declaration is not None)

    @property
    def default(self) -> bool:
        """Whether tests without a mark belong here."""
        return self.lane == self.project.catalogue.default_lane

    def takes_unplanned(self, test_id: str) -> bool:
        """Whether a test that only collection found (inherited, generated) belongs to this shard."""
        index, num_shards = parse_shard(self.shard)
        return self.default and shard_of_unplanned(test_id, num_shards) == index


class NothingToRunError(LanesError):
    """The lane is known and has nothing here: said aloud, and never a success."""


def assign(
    root: Path, lane: str, hardware: str | None, shard: str, plan_path: Path | None, *, check_machine: bool
) -> Assignment:
    """The assignment of a run. ``hardware`` None: that of this machine.

    Raises ``LanesError`` for an unknown lane, hardware or shard, faulty marks, or a machine that is not the one named,
    ``NothingToRunError`` if no test is left to run.
    """
    project = read_project(root)
    catalogue = project.catalogue
    if lane not in catalogue.lanes:
        raise LanesError(f"unknown lane {lane}; known: {', '.join(catalogue.lanes)}")
    if hardware is not None and hardware != CPU and hardware not in catalogue.hardware:
        raise LanesError(f"unknown hardware {hardware}; known: {', '.join([CPU, *catalogue.hardware])}")
    if project.problems:
        raise LanesError(project.problems)
    index, num_shards = parse_shard(shard)
    num_gpus = catalogue.lanes[lane].num_gpus
    if num_gpus == 0:
        if hardware not in (None, CPU):
            raise LanesError(f"lane {lane} has no GPUs; --hardware {hardware} does not fit it")
        machine = Machine(CPU, (), CPU, "the lane needs no GPU")
        hardware = CPU
    else:
        machine = detect(catalogue)
        hardware = _checked(machine, hardware, num_gpus, lane, check=check_machine)
    cases = {
        case.test_id: case
        for case in project.cases
        if case.lane == lane and case.hardware == hardware and case.disabled is None
    }
    if plan_path is None:
        minutes = {test_id: project.history.minutes(case) for test_id, case in cases.items()}
        chosen = set(split(minutes, num_shards)[index])
        planned_commit = UNKNOWN
    else:
        chosen, planned_commit = _planned(plan_path, lane, hardware, shard, cases)
    commit = commit_of(root)
    commit = planned_commit if commit == UNKNOWN else commit  # a container may not be allowed to read .git
    files = _files(project, lane, {cases[test_id].path for test_id in chosen})
    if not chosen:
        raise NothingToRunError(f"not tested: lane {lane} has nothing enabled on {hardware} in shard {shard}")
    elsewhere = frozenset(test.test_id for test in project.tests) - chosen
    kept = {test_id: case for test_id, case in cases.items() if test_id in chosen}
    return Assignment(project, machine, lane, hardware, shard, kept, elsewhere, files, commit)


def _checked(machine: Machine, hardware: str | None, num_gpus: int, lane: str, *, check: bool) -> str:
    """The hardware that the run is of, after it was compared with what is here."""
    if not check and hardware is not None:
        return hardware
    seen = f"{', '.join(sorted(set(machine.devices))) or 'no GPU'} ({machine.source})"
    wanted = hardware or machine.hardware
    if wanted is None:
        raise LanesError(
            f"lane {lane}: this machine has {seen}, which no device_names of the catalogue match; add the name there, "
            f"or if the driver tells none, say which hardware it is by {VARIABLE}"
        )
    if wanted != machine.hardware:
        raise LanesError(f"lane {lane}: --hardware {wanted}, but this machine has {seen}")
    if len(machine.devices) < num_gpus:
        raise LanesError(
            f"lane {lane} needs {num_gpus} × {wanted}, but this machine has {len(machine.devices)}: {seen}"
        )
    return wanted


def _planned(path: Path, lane: str, hardware: str, shard: str, cases: Mapping[str, Case]) -> tuple[set[str], str]:
    plan = Plan.read(path)
    jobs = [job for job in plan.jobs if (job.lane, job.hardware, job.shard) == (lane, hardware, shard)]
    if not jobs:
        known = ", ".join(f"{job.lane} {job.hardware} {job.shard}" for job in plan.jobs) or "none"
        raise LanesError(f"{path} has no job {lane} {hardware} {shard}; it has {known}")
    planned = {test_id for test_id, _, _ in jobs[0].tests}
    gone = sorted(planned - cases.keys())
    if gone:
        raise LanesError([f"{path}: {one} was planned, and is not enabled here: plan anew" for one in gone])
    return planned, plan.commit


def _files(project: Project, lane: str, of_cases: set[str]) -> tuple[str, ...]:
    """Files to collect: those of the cases; for the default lane also those whose tests only collection finds."""
    if lane != project.catalogue.default_lane:
        return tuple(sorted(of_cases))
    known = {test.path for test in project.tests}
    every = {
        path.relative_to(project.root).as_posix() for path in files_of_tests(project.root, project.catalogue.test_paths)
    }
    inheriting = every - known
    mixed = {test.path for test in project.tests if test.declaration is None and "::" in test.name}
    return tuple(sorted(of_cases | inheriting | mixed))
