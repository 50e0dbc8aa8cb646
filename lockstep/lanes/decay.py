"""What makes a plan red: declarations, catalogue and machines that no longer fit, with the place and the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from typing import Any

from lockstep.lanes.catalogue import FILE, Catalogue
from lockstep.lanes.declare import CPU, EVERYWHERE, Case, Declaration, FoundTest

LayoutCheck = Callable[[Case], Sequence[str]]


def check_declarations(tests: Iterable[FoundTest], catalogue: Catalogue, today: date) -> list[str]:
    """Marks that name what the catalogue lacks, are never collected, have expired, or can't finish in their time."""
    problems: list[str] = []
    for test in tests:
        if test.declaration is None:
            continue
        found = [] if test.never_collected is None else [f"is registered and never runs: {test.never_collected}"]
        found += _names(test.declaration, catalogue)
        found += _expiry(test.declaration, today)
        found += _time(test.declaration, catalogue)
        problems += [f"{test.where}: {test.name} {text}" for text in found]
    return problems


def _names(declaration: Declaration, catalogue: Catalogue) -> list[str]:
    problems: list[str] = []
    lane = catalogue.lanes.get(declaration.lane)
    if lane is None:
        problems.append(f"asks for the unknown lane {declaration.lane}; known: {', '.join(catalogue.lanes)}")
    for label in declaration.labels:
        entry = catalogue.labels.get(label)
        if entry is None:
            problems.append(f"has the unknown label {label}; known: {', '.join(catalogue.labels) or 'none'}")
        elif not entry.picks_tests:
            problems.append(f"carries label {label}, which picks machines, not tests")
    for vendor, models in declaration.hardware.items():
        for model in models:
            if model != CPU and model not in catalogue.hardware:
                known = ", ".join([CPU, *catalogue.hardware])
                problems.append(f"asks for the unknown hardware {model}; known: {known}")
            elif catalogue.vendor(model) != vendor:
                problems.append(f"names {model} under {vendor}, but it is {catalogue.vendor(model)}")
            elif lane is not None and (model == CPU) != (lane.num_gpus == 0):
                problems.append(f"asks for {model} in lane {declaration.lane}, which has {lane.num_gpus} GPUs")
    allowed = {EVERYWHERE, *declaration.hardware, *(m for models in declaration.hardware.values() for m in models)}
    for name in ("disabled", "overlay", "layout", "extra_args", "extra_env"):
        table: Mapping[str, Any] = getattr(declaration, name)
        problems += [
            f"has {name} for {key}, which it does not run on; it runs on {', '.join(sorted(allowed))}"
            for key in table.keys() - allowed
        ]
    return problems


def _expiry(declaration: Declaration, today: date) -> list[str]:
    return [
        f"is disabled on {key} since before {off.expires}, which has passed: {off.reason} ({off.issue}); "
        "fix it, or decide anew with a new date"
        for key, off in declaration.disabled.items()
        if off.expired(today)
    ]


def _time(declaration: Declaration, catalogue: Catalogue) -> list[str]:
    """A job's limit, the estimate and a run's steps have to agree: else it can never reach what it checks."""
    problems: list[str] = []
    lane = catalogue.lanes.get(declaration.lane)
    if lane is not None and declaration.minutes > lane.limit_minutes:
        problems.append(
            f"takes {declaration.minutes:g} min, but a job of lane {declaration.lane} ends after {lane.limit_minutes:g}"
        )
    run = declaration.run
    if "num_steps" in run and "step_s" in run:
        needed = run["num_steps"] * run["step_s"] / 60
        if needed > declaration.minutes:
            problems.append(
                f"can't reach step {run['num_steps']:g}: {run['num_steps']:g} steps of {run['step_s']:g} s take "
                f"{needed:.0f} min, and minutes={declaration.minutes:g}"
            )
    if run.get("checked_at_step", 0) > run.get("num_steps", float("inf")):
        problems.append(f"checks step {run['checked_at_step']:g} of a run of {run['num_steps']:g}")
    return problems


def check_runners(cases: Iterable[Case], catalogue: Catalogue, online: Sequence[frozenset[str]] | None) -> list[str]:
    """Lanes whose cases no runner can take. ``online``: labels of each machine that answers; None: not known."""
    needs: dict[tuple[str, str, int], int] = {}
    for case in cases:
        if case.disabled is None:
            key = (case.lane, case.hardware, case.num_gpus)
            needs[key] = needs.get(key, 0) + 1
    problems: list[str] = []
    for (lane, hardware, num_gpus), count in needs.items():
        tests = f"{count} test{'s' if count != 1 else ''}"
        runners = catalogue.runners_for(hardware, num_gpus)
        if not runners:
            what = f"{num_gpus} × {hardware}" if num_gpus else hardware
            problems.append(f"{FILE}: lane {lane} has {tests} for {hardware} and no runner with {what}; add one")
        elif online is not None and not any(
            set(catalogue.runners[name].labels) <= labels for name in runners for labels in online
        ):
            problems.append(f"lane {lane}: {tests} for {hardware}, and no machine of {', '.join(runners)} is online")
    return problems


def check_vendors(cases: Sequence[Case]) -> list[str]:
    """Vendors all of whose cases are off: registered and disabled at once is no coverage."""
    problems: list[str] = []
    for vendor in sorted({case.vendor for case in cases} - {CPU}):
        own = [case for case in cases if case.vendor == vendor]
        if all(case.disabled is not None for case in own):
            problems.append(
                f"all {len(own)} cases on {vendor} are disabled, so nothing runs there: enable one, or take {vendor} "
                "out of the marks until something does"
            )
    return problems


def check_layouts(cases: Iterable[Case], check: LayoutCheck) -> list[str]:
    """What the project's layout check says of each enabled case; the same answer for several hardware once each."""
    return [
        f"{case.where}: {case.test_id} on {case.hardware}: {text}"
        for case in cases
        if case.disabled is None
        for text in _answer(case, check)
    ]


def _answer(case: Case, check: LayoutCheck) -> Sequence[str]:
    """What a project's check says; a check that fails or answers something else has not found the case right."""
    try:
        answer = check(case)
    except Exception as error:  # a hook of any project
        return [f"the layout check itself failed: {type(error).__name__}: {error}"]
    if isinstance(answer, list | tuple) and all(isinstance(text, str) for text in answer):
        return answer
    return [f"the layout check returned {answer!r}; expected a list of texts, empty if all is right"]
