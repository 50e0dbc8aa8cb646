"""The invented run that tests of reports read has the metrics that a real run writes, and no others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lockstep.metrics.sinks import read_jsonl
from tests.synthetic_run import metric_row

pytestmark = pytest.mark.slow

LEFT_OUT = {"time/save_s"}
"""Of steps that follow a save: a run as short as this one may have none."""


def test_every_metric_of_the_synthetic_run_is_one_that_a_run_writes(straight_run: Path) -> None:
    written = {name for row in read_jsonl(straight_run / "metrics.jsonl") for name in row}
    invented = set(metric_row(10, 10, np.random.default_rng(0))) - LEFT_OUT
    assert invented <= written, sorted(invented - written)
