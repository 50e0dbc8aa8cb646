"""The top of the page (what run, what verdict, what it achieved), the table of receipts, and the foot."""

from __future__ import annotations

import math
from collections import Counter
from statistics import median

from lockstep import __version__
from lockstep.metrics.metric import unit_of
from lockstep.metrics.report.charts import gate_bound, gate_metric
from lockstep.metrics.report.collect import RunData, number
from lockstep.metrics.sinks import Row

Tile = dict[str, object]

MAX_RECEIPTS = 300


def build_headline(run: RunData) -> tuple[str, dict[str, str], list[Tile], str]:
    """Title, verdict (``text``, ``level`` good/warn/bad/plain, ``sentence``), tiles, and one line about the run."""
    name = run.setting("name")
    title = name if isinstance(name, str) else run.path.resolve().name
    tiles = [
        *_heldout_tile(run, "eval/accuracy", "Held-out accuracy"),
        *_heldout_tile(run, "eval/format", "Held-out form"),
        *_reward_tile(run),
        *_agreement_tile(run),
        *_speed_tile(run),
        *_memory_tile(run),
        *_time_tile(run),
    ]
    return title, _verdict(run), tiles, _description(run)


def _description(run: RunData) -> str:
    parts = [run.setting("description")]
    source, kind = run.setting("model.source"), run.setting("task.kind")
    named = [run.setting(f"model.{key}") for key in ("package", "path", "model_type")]
    model = next((str(value) for value in named if value), None)
    if source:
        parts.append(f"Model {model} ({source})." if model else f"Model from {source}.")
    if kind:
        parts.append(f"Task {run.setting('task.dataset') or kind}.")
    prompts, group = run.setting("algorithm.num_prompts"), run.setting("algorithm.group_size")
    if prompts and group:
        parts.append(f"{prompts} prompts × {group} samples a step.")
    return " ".join(str(part) for part in parts if part)


def _verdict(run: RunData) -> dict[str, str]:
    statuses = [row["verdict/status"] for row in run.rows if isinstance(row.get("verdict/status"), str)]
    sentences = [row["verdict/sentence"] for row in run.rows if isinstance(row.get("verdict/sentence"), str)]
    if not statuses:
        return {"text": "no verdict recorded", "level": "plain", "sentence": ""}
    counts = Counter(str(status) for status in statuses)
    total = len(statuses)
    if set(counts) == {"pass"}:
        text, level = f"agreement held at all {total} steps" if total > 1 else "agreement held at its one step", "good"
    else:
        listed = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        soft = set(counts) <= {"pass", "warn", "correct", "unjudged"}
        text, level = f"verdicts: {listed}", "warn" if soft else "bad"
    return {"text": text, "level": level, "sentence": f"Last verdict: {sentences[-1]}" if sentences else ""}


def _measured(run: RunData, name: str) -> list[tuple[int, float]]:
    return [(step, value) for step, value in zip(run.steps, run.column(name), strict=True) if value is not None]


def _heldout_tile(run: RunData, name: str, label: str) -> list[Tile]:
    points = _measured(run, name)
    if not points:
        return []
    (first, before), (last, after) = points[0], points[-1]
    if first == last:
        return [{"label": label, "value": after, "detail": f"measured once, at step {first}"}]
    return [{"label": label, "before": before, "value": after, "detail": f"step {first} → step {last}"}]


def _reward_tile(run: RunData) -> list[Tile]:
    points = _measured(run, "reward/mean")
    if not points:
        return []
    span = min(3, len(points))
    first = sum(value for _, value in points[:span]) / span
    last = sum(value for _, value in points[-span:]) / span
    if len(points) < 6:
        return [{"label": "Reward", "value": points[-1][1], "detail": f"at step {points[-1][0]}"}]
    detail = f"mean of the first {span} → of the last {span} steps"
    return [{"label": "Reward", "before": first, "value": last, "detail": detail}]


def _agreement_tile(run: RunData) -> list[Tile]:
    metric = gate_metric(run)
    points = _measured(run, f"agreement/{metric}")
    if not points:
        return []
    step, worst = max(points, key=lambda point: math.inf if math.isnan(point[1]) else point[1])
    bound = gate_bound(run)
    detail = f"{metric} at step {step}; " + (f"bound {bound:g}" if bound is not None else "bound not recorded")
    return [{"label": "Worst disagreement", "value": worst, "detail": detail}]


def _speed_tile(run: RunData) -> list[Tile]:
    generated = [value for _, value in _measured(run, "throughput/generated_tokens_per_s") if math.isfinite(value)]
    trained = [value for _, value in _measured(run, "throughput/trained_tokens_per_s") if math.isfinite(value)]
    if not generated:
        return []
    detail = f"tokens/s, median; trained: {median(trained):,.0f}" if trained else "tokens/s, median"
    return [{"label": "Generated", "value": median(generated), "detail": detail}]


def _memory_tile(run: RunData) -> list[Tile]:
    points = [value for _, value in _measured(run, "memory/peak_rss_bytes") if math.isfinite(value)]
    return [{"label": "Peak memory", "value": max(points), "unit": "bytes", "detail": "resident"}] if points else []


def _time_tile(run: RunData) -> list[Tile]:
    seconds = [value for _, value in _measured(run, "time/step_s") if math.isfinite(value)]
    if not seconds:
        return []
    detail = f"{len(seconds)} steps, median {median(seconds):.3g} s"
    return [{"label": "Time", "value": _duration(sum(seconds)), "detail": detail}]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def refit_table(run: RunData) -> dict[str, object]:
    """``columns`` (name, is a number, unit), ``rows`` (cells and claims) and a ``summary`` of all claims."""
    if not run.refits:
        return {"columns": [], "rows": [], "summary": "No receipts were recorded."}
    counts: dict[str, Counter[str]] = {}
    for receipt in run.refits:
        for claim in _claims(receipt):
            counts.setdefault(claim["name"], Counter())[claim["status"]] += 1
    claims = "; ".join(
        f"{name} " + ", ".join(f"{status} {count} of {sum(by.values())}" for status, count in sorted(by.items()))
        for name, by in counts.items()
    )
    summary = f"{len(run.refits)} refits. " + (f"Claims: {claims}." if claims else "They record no claims.")
    if len(run.refits) > MAX_RECEIPTS:
        summary += f" The last {MAX_RECEIPTS} are listed."
    rows = [{"cells": _receipt_cells(receipt), "claims": _claims(receipt)} for receipt in run.refits[-MAX_RECEIPTS:]]
    columns = [("step", True, None), ("version", True, None), ("weights", False, None), ("transport", False, None),
               ("bytes", True, "bytes"), ("time", True, "s"), ("transfer GB/s", True, None),
               ("power", True, None), ("noise", True, None), ("coverage", True, None)]  # fmt: skip
    return {"columns": columns, "rows": rows, "summary": summary}


def _receipt_cells(receipt: Row) -> list[object]:
    num_bytes = number(receipt.get("transferred_bytes"))
    seconds, transfer_s = _seconds(receipt), number(receipt.get("transfer_s"))
    rate = num_bytes / transfer_s / 1e9 if num_bytes and transfer_s else None  # not of the proof, which moves nothing
    transport = receipt.get("transport")
    weights, probes = receipt.get("weights"), receipt.get("probes")
    shown = [number(probes.get(name)) if isinstance(probes, dict) else None for name in ("power", "noise", "coverage")]
    return [receipt.get("step"), receipt.get("version"), None if weights is None else str(weights),
            None if transport is None else str(transport), num_bytes, seconds, rate, *shown]  # fmt: skip


def _seconds(receipt: Row) -> float | None:
    """The refit's whole time: the sum over its phases (``begin_s``, ``transfer_s``, …)."""
    phases = [number(value) for name, value in receipt.items() if unit_of(name) == "s"]
    found = [seconds for seconds in phases if seconds is not None]
    return sum(found) if found else None


def _claims(receipt: Row) -> list[dict[str, str]]:
    """Claims as name, status and why; a receipt holds them as a list of {name, status, detail}."""
    claims = receipt.get("claims")
    return [
        {"name": str(claim.get("name")), "status": str(claim.get("status")), "why": str(claim.get("detail") or "")}
        for claim in (claims if isinstance(claims, list) else [])
        if isinstance(claim, dict)
    ]


def footer_text(run: RunData) -> str:
    """Where the run came from, in one line."""
    parts = [f"Lockstep {__version__}", str(run.path.resolve().name)]
    times = [row["time"] for row in run.rows if isinstance(row.get("time"), str)]
    if times:
        parts.append(f"{times[0]} to {times[-1]}")
    profile = run.environment.get("profile")
    profile = profile if isinstance(profile, dict) else {}
    versions, cpu = profile.get("versions"), profile.get("cpu")
    parts += [f"Python {profile['python']}"] if profile.get("python") else []
    if isinstance(versions, dict):
        parts += [f"{name} {versions[name]}" for name in ("torch", "transformers") if versions.get(name)]
    if isinstance(cpu, dict) and cpu.get("name"):
        parts.append(str(cpu["name"]))
    return " · ".join(parts)
