"""Lockstep's filling of the lanes' layout hook: each case's recipe, judged by the layout rules at planning, on a CPU.

A case's ``layout`` are settings of its recipe (``{"trainer.layout.ep": 4}``), which its test passes to the run too, so
what is judged is what would run.
"""

from __future__ import annotations

import json

from lockstep.lanes.declare import Case


def settings(case: Case) -> list[str]:
    """A case's layout as ``--set`` arguments: ``trainer.layout.ep=4``."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in case.layout.items()]


def check(case: Case) -> list[str]:
    """What is wrong with a case's recipe on its hardware: refused settings, broken layout rules, too few devices."""
    if case.recipe is None:
        return ["layout is given without a recipe that it would change"] if case.layout else []
    from lockstep.config.errors import ConfigError
    from lockstep.driver.jobs import job_of
    from lockstep.recipes import load_recipe
    from lockstep.topology.layout import check_layout

    try:
        job = job_of(load_recipe(case.recipe, settings(case), hardware=case.overlay, unverified=True).config)
    except ConfigError as error:
        return [violation.text() for violation in error.violations]
    problems = [finding.text() for finding in check_layout(job) if finding.severity == "error"]
    if case.num_gpus and job.num_gpus > case.num_gpus:
        problems.append(f"recipe {case.recipe} needs {job.num_gpus} devices, lane {case.lane} has {case.num_gpus}")
    return problems
