"""``lockstep parity report``: the agreement of a run made elsewhere, from its recorded log-probs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

EPILOG = "Examples:  lockstep parity report logprobs.npz   |   lockstep parity report run.parquet --out page.html"


def report_recorded(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .parquet or .npz file; docs/agreement.md: columns.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="PAGE", help="Default: beside FILE, .html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as one JSON object.")] = False,
) -> None:
    """Measure log-probs recorded by any trainer and write the page about them.

    Exits 1 if a value is not finite or no token could be compared, 2 if the file can't be read.
    """
    from lockstep.metrics.metric import encode_nonfinite
    from lockstep.metrics.report.recorded import write_recorded_report
    from lockstep.parity.recorded import RecordedError

    try:
        page, recorded = write_recorded_report(file, out)
    except (RecordedError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    numbers = recorded.whole.flat("")
    if as_json:
        steps = {str(step.step): step.agreement.flat("") for step in recorded.steps}
        found = {"page": str(page), "numbers": numbers, "steps": steps, "notes": recorded.notes}
        print(json.dumps(encode_nonfinite(found), indent=2, allow_nan=False))
    else:
        width = max(len(name) for name in numbers)
        print("\n".join(f"{name:{width}}  {value:.6g}" for name, value in numbers.items()))
        print("\n".join(recorded.notes), file=sys.stderr)
        print(page)
    if recorded.whole.unjudged or recorded.whole.num_nonfinite:
        raise typer.Exit(1)
