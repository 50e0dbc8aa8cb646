"""Where the difference sits: by position, decile, routes, replica and version, and the worst tokens in their text.

Both come from ``agreement.jsonl`` (see ``parity.rows`` for its lines). Counts, means and maxima over all steps are
exact: sums are added, not means averaged.
"""

from __future__ import annotations

import math

from lockstep.metrics.report.collect import RunData, number
from lockstep.metrics.report.samples import spread
from lockstep.metrics.sinks import Row
from lockstep.parity.rows import unquoted

Cell = list[float]
"""[tokens, mean \\|d\\|, largest \\|d\\|]"""

KINDS = {
    "position": ("Position in the response", "position"),
    "decile": ("Decile of the engine's log-prob", "0: the least likely tokens"),
    "routes": ("Experts chosen by both sides", "flipped: the sets differ in some layer"),
    "replica": ("Replica that sampled it", "replica"),
    "version": ("Policy version that sampled it", "stale ones included"),
}

MAX_STEPS = 100
"""Steps whose buckets the page can show one by one; all steps together are shown anyhow."""

NUM_WORST = 25
MAX_CONTEXT_CHARACTERS = 400


def bucket_tables(run: RunData) -> dict[str, object]:
    """``kinds``: per kind title, hint, labels in order, and rows of cells by step ("all" first); ``note``."""
    rows = [row for row in run.agreement if isinstance(row.get("buckets"), dict)]
    chosen = sorted(spread([int(str(row["step"])) for row in rows], MAX_STEPS))
    kinds: list[dict[str, object]] = []
    for kind, (title, hint) in KINDS.items():
        by_step = {int(str(row["step"])): cells for row in rows if (cells := _cells(row, kind))}
        if not by_step:
            continue
        labels = _ordered([label for cells in by_step.values() for label in cells])
        tables = {"all": _pooled(list(by_step.values()))}
        tables |= {str(step): by_step[step] for step in chosen if step in by_step}
        kinds.append({
            "kind": kind, "title": title, "hint": hint, "labels": labels,
            "steps": {step: [cells.get(label) for label in labels] for step, cells in tables.items()},
        })  # fmt: skip
    if not kinds:
        note = "No differences by place were recorded in this run."
    elif len(chosen) < len(rows):
        note = f"{len(rows)} steps together, and {len(chosen)} of them to choose from."
    else:
        note = f"{len(rows)} steps, together or one by one."
    return {"kinds": kinds, "note": note}


def route_charts(run: RunData) -> list[dict[str, object]]:
    """A chart of expert sets that differ between the sides, or none where ids were not recorded on both."""
    agreeing = run.column("agreement/route_agree")
    if all(value is None for value in agreeing):
        return []
    flips = [None if value is None else 1 - value for value in agreeing]
    series = {"name": "agreement/route_agree", "label": "flipped", "values": flips, "color": 4}
    return [{
        "id": "routes", "title": "Route flips", "unit_label": "share of (token, layer) whose expert sets differ",
        "steps": run.steps, "zero": True, "series": [series],
    }]  # fmt: skip


def worst_tokens(run: RunData) -> list[dict[str, object]]:
    """The worst tokens of all recorded steps: those that are not finite first, then by \\|d\\|."""
    found: list[dict[str, object]] = []
    for row in run.agreement:
        listed = row.get("worst")
        for token in listed if isinstance(listed, list) else []:
            train, rollout = number(token.get("train")), number(token.get("rollout"))
            if train is None or rollout is None:
                continue
            difference = train - rollout
            shown = {name: _shortened(token.get(name), name) for name in ("before", "text", "after")}
            found.append({**token, **shown, "step": row["step"], "diff": difference})
    found.sort(key=lambda token: -_badness(number(token["diff"])))
    return found[:NUM_WORST]


def _badness(difference: float | None) -> float:
    """\\|d\\|; a difference that is not a number comes first."""
    return math.inf if difference is None or math.isnan(difference) else abs(difference)


def _shortened(recorded: object, name: str) -> str | None:
    text = unquoted(recorded)
    if text is None:
        return None
    if len(text) <= MAX_CONTEXT_CHARACTERS:
        return text
    return f"…{text[-MAX_CONTEXT_CHARACTERS:]}" if name == "before" else f"{text[:MAX_CONTEXT_CHARACTERS]}…"


def _cells(row: Row, kind: str) -> dict[str, Cell]:
    buckets = row["buckets"]
    by_label = buckets.get(kind) if isinstance(buckets, dict) else None
    return by_label if isinstance(by_label, dict) else {}


def _pooled(tables: list[dict[str, Cell]]) -> dict[str, Cell]:
    pooled: dict[str, Cell] = {}
    for table in tables:
        for label, (num, mean, most) in table.items():
            total, so_far, top = pooled.get(label, [0, 0.0, 0.0])
            pooled[label] = [total + num, (so_far * total + mean * num) / (total + num), max(top, most)]
    return pooled


def _ordered(labels: list[str]) -> list[str]:
    """Each label once, numbers and ranges of numbers by size."""
    once = list(dict.fromkeys(labels))
    heads = {label: label.split("-")[0] for label in once}
    return sorted(once, key=lambda label: int(heads[label])) if all(h.isdigit() for h in heads.values()) else once
