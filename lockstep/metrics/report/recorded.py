"""The same page about a run made elsewhere, from one file of recorded log-probs (see ``parity.recorded``)."""

from __future__ import annotations

from pathlib import Path

from lockstep.durable import replace_text
from lockstep.metrics.report.charts import Chart, build_charts, series_of
from lockstep.metrics.report.collect import RunData
from lockstep.metrics.report.page import render_page
from lockstep.metrics.report.places import route_charts
from lockstep.metrics.report.run_page import page_data
from lockstep.metrics.sinks import Row
from lockstep.parity.recorded import RecordedRun, measure_file


def write_recorded_report(source: Path | str, out: Path | str | None = None) -> tuple[Path, RecordedRun]:
    """Measure ``source`` and write the page to ``out`` (default: beside it, ending in ``.html``), whole or not at all.

    Returns the page's path and the measurement. Raises RecordedError if the file can't be read as recorded log-probs.
    """
    recorded = measure_file(source)
    path = Path(out) if out is not None else recorded.path.with_suffix(".html")
    run = _as_run(recorded)
    title = f"{recorded.path.name}: agreement of a recorded run"
    data = page_data(run, samples={"steps": {}, "note": ""}) | {
        "title": title,
        "charts": [_unjudged(chart) for chart in [*build_charts(run), *route_charts(run)] if chart["series"]],
        "numbers": list(recorded.whole.flat("").items()),
    }
    replace_text(path, render_page(title, data))
    return path, recorded


def _unjudged(chart: Chart) -> Chart:
    """A chart without words about a gate that was not there."""
    series = [{**one, "label": str(one["label"]).removesuffix(" (judged)")} for one in series_of(chart)]
    return {name: value for name, value in chart.items() if name != "note"} | {"series": series}


def _as_run(recorded: RecordedRun) -> RunData:
    rows: list[Row] = [{"step": step.step, **step.agreement.flat()} for step in recorded.steps]
    whole = recorded.whole
    notes = [
        f"{whole.num_tokens:,} tokens were compared; {whole.num_stale:,} stale and {whole.num_nonfinite:,} not finite.",
        "Nothing was judged: a recorded file has no bound.",
        *recorded.notes,
    ]
    return RunData(
        path=recorded.path,
        config={},
        environment={},
        rows=rows,
        refits=[],
        rollout_steps=[],
        notes=notes,
        agreement=[dict(step.row) for step in recorded.steps],
    )
