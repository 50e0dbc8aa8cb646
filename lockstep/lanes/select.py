"""Which cases a plan has, and a reason for each one that it has and each one that it leaves out.

A case must pass four questions, in this order; the first *no* is its reason to be skipped:

1. is it enabled? A case that is disabled and not expired is skipped;
2. is its stage asked for? *nightly* only by a label or by name;
3. is its hardware asked for? Labels that pick vendors or hardware restrict GPU cases to these;
4. is it relevant? In the always-run set; or carries one of the labels given; or is reached from a changed file; or
   nothing narrows the plan (no suite label and no ``--changed-since``).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.lanes.catalogue import NIGHTLY, Catalogue
from lockstep.lanes.declare import CPU, Case, FoundTest, make_case
from lockstep.lanes.errors import LanesError


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a plan. ``changed``: reason by test file, from changed files; None without ``--changed-since``.

    ``stages``: only these, empty for all but nightly.
    """

    labels: tuple[str, ...] = ()
    changed: Mapping[str, str] | None = None
    stages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """A case, whether the plan has it, and why."""

    case: Case
    selected: bool
    reason: str


def all_cases(tests: Iterable[FoundTest], catalogue: Catalogue) -> list[Case]:
    """One case for each test and hardware; a test without a mark is one CPU case of the default lane.

    Declarations that name what the catalogue lacks give no case: ``decay.check_declarations`` reports them.
    """
    cases: list[Case] = []
    default = catalogue.lanes[catalogue.default_lane]
    for test in tests:
        declaration = test.declaration
        if declaration is None:
            cases.append(
                Case(
                    test_id=test.test_id, where=test.where, lane=catalogue.default_lane, stage=default.stage,
                    vendor=CPU, hardware=CPU, num_gpus=0, minutes=catalogue.default_minutes, declared=False,
                    retries=default.retries,
                )
            )  # fmt: skip
            continue
        lane = catalogue.lanes.get(declaration.lane)
        for vendor, models in declaration.hardware.items():
            for hardware in models:
                known = hardware == CPU or hardware in catalogue.hardware
                if lane is None or not known or catalogue.vendor(hardware) != vendor:
                    continue
                cases.append(
                    make_case(
                        test, declaration, vendor, hardware,
                        stage=lane.stage, num_gpus=lane.num_gpus, retries=lane.retries,
                    )
                )  # fmt: skip
    return cases


def select(cases: Sequence[Case], catalogue: Catalogue, request: Request) -> list[Decision]:
    """A decision for every case, in the order given. Raises ``LanesError`` for an unknown label or stage."""
    problems = [
        f"unknown label {name}; known: {', '.join(catalogue.labels) or 'none'}"
        for name in request.labels
        if name not in catalogue.labels
    ]
    problems += [
        f"unknown stage {name}; known: {', '.join(catalogue.stages)}"
        for name in request.stages
        if name not in catalogue.stages
    ]
    if problems:
        raise LanesError(problems)
    return [_decide(case, catalogue, request) for case in cases]


def _decide(case: Case, catalogue: Catalogue, request: Request) -> Decision:
    for question in (_enabled, _stage, _hardware, _relevant):
        answer, reason = question(case, catalogue, request)
        if not answer:
            return Decision(case, False, reason)
    return Decision(case, True, reason)


def _enabled(case: Case, catalogue: Catalogue, request: Request) -> tuple[bool, str]:
    off = case.disabled
    return off is None, "" if off is None else f"disabled until {off.expires}: {off.reason} ({off.issue})"


def _stage(case: Case, catalogue: Catalogue, request: Request) -> tuple[bool, str]:
    if request.stages:
        return case.stage in request.stages, f"stage {case.stage} was not asked for"
    by_label = {stage for name in request.labels for stage in catalogue.labels[name].stages}
    if case.stage == NIGHTLY and NIGHTLY not in by_label:
        return False, "nightly is planned only when asked for: --stage nightly, or a label that picks it"
    return True, ""


def _hardware(case: Case, catalogue: Catalogue, request: Request) -> tuple[bool, str]:
    picking = [name for name in request.labels if catalogue.labels[name].vendors or catalogue.labels[name].hardware]
    if case.hardware == CPU or not picking:
        return True, ""
    for name in picking:
        label = catalogue.labels[name]
        if case.vendor in label.vendors or case.hardware in label.hardware:
            return True, f"{case.hardware} by label {name}"
    return False, f"{case.hardware} is not among what {', '.join(picking)} picks"


def _relevant(case: Case, catalogue: Catalogue, request: Request) -> tuple[bool, str]:
    if matches(case.test_id, catalogue.always_run):
        return True, "always run"
    suites = [name for name in request.labels if catalogue.labels[name].picks_tests]
    carried = [name for name in suites if name in case.labels]
    if carried:
        return True, f"label {', '.join(carried)}"
    if request.changed is not None and case.path in request.changed:
        return True, request.changed[case.path]
    if not suites and request.changed is None:
        return True, "nothing narrows the plan"
    missing = [f"carries none of {', '.join(suites)}"] if suites else []
    missing += ["no changed file reaches it"] if request.changed is not None else []
    return False, " and ".join(missing)


def matches(test_id: str, patterns: Iterable[str]) -> bool:
    """Whether a test id, its file or a folder above matches one of the patterns (``*`` crosses folders)."""
    path = test_id.partition("::")[0]
    return any(
        fnmatch.fnmatchcase(test_id, pattern)
        or fnmatch.fnmatchcase(path, pattern)
        or path.startswith(pattern.rstrip("/") + "/")
        for pattern in patterns
    )
