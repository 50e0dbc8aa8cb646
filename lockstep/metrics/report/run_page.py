"""Everything that the page's script reads, from what was collected."""

from __future__ import annotations

from lockstep.metrics.report.charts import build_charts, explorer_series
from lockstep.metrics.report.collect import RunData
from lockstep.metrics.report.headline import build_headline, footer_text, refit_table
from lockstep.metrics.report.places import bucket_tables, route_charts, worst_tokens


def page_data(run: RunData, samples: dict[str, object]) -> dict[str, object]:
    """The page's data. ``samples``: what ``choose_samples`` gives. ``numbers``: (name, value) pairs of a table
    that only the page of a recorded file has, which then leaves out what such a file can't hold."""
    title, verdict, tiles, description = build_headline(run)
    explorer = explorer_series(run)
    return {
        "title": title,
        "description": description,
        "verdict": verdict,
        "tiles": tiles,
        "notes": run.notes,
        "steps": run.steps,
        "charts": [*build_charts(run), *route_charts(run)],
        "buckets": bucket_tables(run),
        "worst": worst_tokens(run),
        "numbers": [],
        "explorer": explorer,
        "refits": refit_table(run),
        "samples": samples,
        "footer": footer_text(run),
    }
