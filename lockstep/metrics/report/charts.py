"""Which charts the page has, as plain data that its script draws.

A chart: ``id``, ``title``, ``unit`` (how ticks are printed), ``steps`` (x), ``series``, and optionally ``kind``
("stack"), ``log``, ``zero`` (axis from 0), ``bound``, ``bound_label``, ``note``, ``wide``. A series: ``name`` of its
metric, ``label``, ``values`` over the steps (None: absent), and optionally ``color`` (number in the palette),
``sparse`` (measured now and then: points joined over the gaps), ``faint`` (context, not the subject).
"""

from __future__ import annotations

import math

from lockstep.metrics.metric import unit_of
from lockstep.metrics.report.collect import RunData, number

PHASES = ("rollout", "logprobs", "train", "optim", "refit", "eval", "save")
"""Phases in the order in which a step runs them; other ``time/*_s`` follow in the order of their names."""

OUTSIDE_STEP = ("save",)
"""Phases that run after the step's own clock has stopped: they stand on top of ``time/step_s``."""

INSIDE_ANOTHER = ("score",)
"""Phases that lie inside others, as scoring does in rollout and eval: stacked, their time would count twice."""

BOUND = "bound/"
"""Before the name of a metric: its bound, in the rows of a run that judges more than one."""

MAX_EXPLORER_VALUES = 400_000

Chart = dict[str, object]
Series = dict[str, object]


def build_charts(run: RunData) -> list[Chart]:
    """The page's charts; one without any value is kept and says so."""
    judged = [_agreement(run), *_other_bounds(run)]
    return [_reward(run), _accuracy(run), *judged, _throughput(run), _memory(run), _time_by_phase(run)]


def explorer_series(run: RunData) -> dict[str, Series]:
    """Every recorded number that no chart shows, by name, for the chart with a choice. Empty if that is too much."""
    charted = {str(series["name"]) for chart in build_charts(run) for series in series_of(chart)}
    recorded = {name for row in run.rows for name, value in row.items() if number(value) is not None}
    recorded -= {name for name in recorded if name.startswith(BOUND)}
    names = sorted(recorded - charted - {"step", "agreement/bound"})
    if len(names) * len(run.rows) > MAX_EXPLORER_VALUES:
        run.notes.append(f"{len(names)} metrics over {len(run.rows)} steps are too many to choose from on this page.")
        return {}
    return {name: {"values": run.column(name), "unit": unit_of(name)} for name in names}


def series_of(chart: Chart) -> list[Series]:
    """A chart's series."""
    series = chart["series"]
    return series if isinstance(series, list) else []


def _series(run: RunData, name: str, label: str, color: int, **style: bool) -> list[Series]:
    """One series in a list, or an empty list if the run never measured it."""
    values = run.column(name)
    if all(value is None for value in values):
        return []
    return [{"name": name, "label": label, "values": values, "color": color, **style}]


def _reward(run: RunData) -> Chart:
    series = _series(run, "reward/mean", "training samples, mean", 0)
    series += _series(run, "eval/reward", "held out", 0, sparse=True)
    return {"id": "reward", "title": "Reward", "steps": run.steps, "zero": True, "series": series}


def _accuracy(run: RunData) -> Chart:
    series = _series(run, "accuracy/mean", "right", 0)
    series += _series(run, "eval/accuracy", "right, held out", 0, sparse=True)
    series += _series(run, "format/mean", "in the asked form", 1)
    series += _series(run, "eval/format", "in the asked form, held out", 1, sparse=True)
    return {
        "id": "accuracy",
        "title": "Accuracy and form, apart",
        "unit_label": "share of answers",
        "steps": run.steps,
        "zero": True,
        "series": series,
    }


def gate_metric(run: RunData) -> str:
    """Name of the judged metric, as the last row says, or else the configuration, or else the usual one."""
    recorded = [row["agreement/metric"] for row in run.rows if isinstance(row.get("agreement/metric"), str)]
    configured = _first_bound(run).get("metric")
    return str(recorded[-1] if recorded else configured or "abs_diff/mean")


def gate_bound(run: RunData) -> float | None:
    """The bound in force at the last judged step, or else the configured one."""
    recorded = [value for value in run.column("agreement/bound") if value is not None and math.isfinite(value)]
    return recorded[-1] if recorded else number(_first_bound(run).get("bound"))


def _first_bound(run: RunData) -> dict[str, object]:
    """The first bound of the configuration; empty where none is recorded."""
    bounds = run.setting("gate.bounds")
    return bounds[0] if isinstance(bounds, list) and bounds and isinstance(bounds[0], dict) else {}


def _agreement(run: RunData) -> Chart:
    judged = gate_metric(run)
    series = _series(run, f"agreement/{judged}", f"{judged} (judged)", 0)
    context = [name for name in ("abs_diff/mean", "abs_diff/p99", "abs_diff/max") if name != judged]
    for color, other in enumerate(context, start=2):
        series += _series(run, f"agreement/{other}", other, color, faint=True)
    judged_rows = [row for row in run.rows if row.get("agreement/metric") == judged]
    bounds = {value for row in judged_rows if (value := number(row.get("agreement/bound"))) is not None}
    changed = f" The bound had {len(bounds)} values during the run; the last one is drawn." if len(bounds) > 1 else ""
    recorded = [row["verdict/evidence"] for row in judged_rows if isinstance(row.get("verdict/evidence"), str)]
    reason = recorded[-1] if recorded else _first_bound(run).get("evidence")
    note = f"Bound: {reason}" if isinstance(reason, str) else "The reason for the bound is not recorded."
    return {
        "id": "agreement",
        "title": "Agreement of trainer and rollout engine",
        "unit_label": "|log π_train − log π_rollout| on sampled tokens, log scale",
        "steps": run.steps,
        "wide": True,
        "log": True,
        "bound": gate_bound(run),
        "bound_label": f"bound on {judged}",
        "note": note + changed,
        "series": series,
    }


def _other_bounds(run: RunData) -> list[Chart]:
    """A chart of each other metric that this run holds a bound against, with that bound."""
    judged = gate_metric(run)
    last = {name: value for row in run.rows for name, value in row.items() if name.startswith(BOUND)}
    metrics = [name.removeprefix(BOUND) for name in last if name != f"{BOUND}{judged}"]
    return [
        {
            "id": f"agreement-{metric.replace('/', '-')}",
            "title": f"Agreement: {metric}",
            "unit_label": "log scale",
            "steps": run.steps,
            "wide": True,
            "log": True,
            "bound": number(last[f"{BOUND}{metric}"]),
            "bound_label": f"bound on {metric}",
            "series": _series(run, f"agreement/{metric}", metric, 0),
        }
        for metric in metrics
    ]


def _time_by_phase(run: RunData) -> Chart:
    present = {
        name.removeprefix("time/").removesuffix("_s")
        for row in run.rows
        for name, value in row.items()
        if name.startswith("time/") and name.endswith("_s") and number(value) is not None
    } - {"step", *INSIDE_ANOTHER}
    present = {
        phase for phase in present if "/" not in phase
    }  # parts of a phase, such as refit/transfer, are within it
    ordered = [phase for phase in PHASES if phase in present] + sorted(present - set(PHASES))
    columns = {phase: run.column(f"time/{phase}_s") for phase in ordered}
    other, overlap = _unaccounted(
        run.column("time/step_s"), [values for phase, values in columns.items() if phase not in OUTSIDE_STEP]
    )
    series: list[Series] = [
        {"name": f"time/{phase}_s", "label": phase, "values": values, "color": color}
        for color, (phase, values) in enumerate(columns.items())
    ]
    if any(other):
        series.append({"name": "time/step_s", "label": "other", "values": other, "color": 6})
    chart: Chart = {
        "id": "time",
        "title": "Time by phase",
        "unit": "s",
        "unit_label": "seconds per step",
        "steps": run.steps,
        "kind": "stack",
        "wide": True,
        "series": series,
    }
    if overlap:
        chart["note"] = "Phases overlap here: they add up to more than the step."
    return chart


def _unaccounted(totals: list[float | None], phases: list[list[float | None]]) -> tuple[list[float | None], bool]:
    """Seconds of each step that no phase claims, and whether the phases claim clearly more than the step has."""
    rest: list[float | None] = []
    overlap = False
    for index, total in enumerate(totals):
        claimed = sum(value for column in phases if (value := column[index]) is not None)
        if total is None or not math.isfinite(total) or not math.isfinite(claimed):
            rest.append(None)
            continue
        overlap = overlap or claimed > 1.02 * total + 0.01
        rest.append(total - claimed if total - claimed > 1e-3 else None)
    return rest, overlap


def _throughput(run: RunData) -> Chart:
    series = _series(run, "throughput/generated_tokens_per_s", "generated", 0)
    series += _series(run, "throughput/trained_tokens_per_s", "trained", 1)
    return {
        "id": "throughput",
        "title": "Throughput",
        "unit_label": "tokens per second",
        "steps": run.steps,
        "zero": True,
        "series": series,
    }


def _memory(run: RunData) -> Chart:
    names = sorted(
        {name for row in run.rows for name in row if name.startswith("memory/") and unit_of(name) == "bytes"}
    )
    series: list[Series] = []
    for color, name in enumerate(names):
        series += _series(run, name, name.removeprefix("memory/").removesuffix("_bytes").replace("_", " "), color)
    return {
        "id": "memory",
        "title": "Memory",
        "unit": "bytes",
        "unit_label": "of the process and its device",
        "steps": run.steps,
        "zero": True,
        "series": series,
    }
