"""The page about recorded log-probs in a real browser: numbers, buckets and worst tokens are drawn, as text."""

from __future__ import annotations

import math

import pytest

from lockstep.metrics.report.recorded import write_recorded_report
from tests.contract.test_report_in_browser import Visit, visit
from tests.synthetic_run import HOSTILE
from tests.unit.test_agreement_recorded import case, write_parquet


@pytest.fixture(scope="module")
def visited(tmp_path_factory: pytest.TempPathFactory) -> Visit:
    folder = tmp_path_factory.mktemp("recorded")
    rows = case()
    rows["token_texts"][4][3] = HOSTILE
    rows["loss_mask"][4][3], rows["train_logprobs"][4][3] = True, math.nan
    page, _ = write_recorded_report(write_parquet(folder / "run.parquet", rows))
    return visit(page, folder)


def test_the_script_runs_to_its_end_without_a_console_line(visited: Visit) -> None:
    assert visited.console == []
    assert visited.dom.find("html", data_ready="yes")
    assert [url for url in visited.requests if not url.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("kind", ["position", "decile", "replica", "version"])
def test_buckets_have_a_bar_for_each_place(visited: Visit, kind: str) -> None:
    (figure,) = visited.dom.find("figure", data_buckets=kind)
    assert "mean |d|" in figure.text
    assert "Not recorded" not in figure.text


def test_worst_tokens_and_numbers_are_shown_as_text(visited: Visit) -> None:
    (worst,) = visited.dom.find("table", id="worst")
    assert "NaN" in worst.text
    assert "</script><script>" in worst.text
    (numbers,) = visited.dom.find("table", id="numbers")
    assert "abs_diff/rollout_mean" in numbers.text


def test_what_a_recorded_file_can_not_hold_is_not_on_the_page(visited: Visit) -> None:
    for section in ("refits-section", "samples-section"):
        (element,) = visited.dom.find("section", id=section)
        assert "hidden" in element.attributes
    (figure,) = visited.dom.find("figure", data_chart="agreement")
    assert "judged" not in figure.text
    assert "bound" not in figure.text
