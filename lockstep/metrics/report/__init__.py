"""The report: one self-contained HTML page about one run folder, or about recorded log-probs of a run made elsewhere.

``collect`` reads the folder, ``charts``, ``places`` and ``headline`` say what the page shows, ``samples`` chooses the
rollouts that fit, ``page`` puts all of it, escaped, into one file. The page needs no network, no server and no other
file; it draws its charts with its own script, so there is no chart library inside it. Prompts and completions are
untrusted text.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.durable import replace_text
from lockstep.metrics.report.collect import collect
from lockstep.metrics.report.page import render_page
from lockstep.metrics.report.run_page import page_data
from lockstep.metrics.report.samples import choose_samples

REPORT = "report.html"


def write_report(run_dir: Path | str) -> Path:
    """Write ``report.html`` into a run folder, whole or not at all, and return its path.

    Works on a run that is going on or stopped early: what is missing is said on the page. Needs no lock. Raises, before
    anything is written, FileNotFoundError if there is no such folder, RunFolderError if no run wrote it, and ValueError
    if a file in it is damaged beyond an unfinished last line.
    """
    run = collect(Path(run_dir))
    data = page_data(run, choose_samples(run))
    path = run.path / REPORT
    replace_text(path, render_page(str(data["title"]), data))
    return path


__all__ = ["REPORT", "write_report"]
