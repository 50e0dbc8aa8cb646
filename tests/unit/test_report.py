"""The report page as data: what is in it, what it says about missing pieces, and that text can't become markup."""

from __future__ import annotations

import html.parser
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.driver.rows import PHASES
from lockstep.metrics.report import charts, write_report
from lockstep.metrics.report.charts import INSIDE_ANOTHER, explorer_series
from lockstep.metrics.report.collect import collect
from lockstep.metrics.report.page import escape_json, render_page
from lockstep.metrics.report.samples import MAX_TOKENS, choose_samples, spread
from lockstep.metrics.run_folder import RunFolder, RunFolderError
from tests.synthetic_run import HOSTILE, make_rollout, make_run, metric_row, noisy, receipt, token_texts


class Page(html.parser.HTMLParser):
    """The page as a browser's parser sees it: scripts by type, and every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._open: dict[str, str | None] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = dict(attrs) if tag == "script" else None
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._open = None

    @property
    def data(self) -> dict:
        (text,) = [text for attributes, text in self.scripts if attributes.get("type") == "application/json"]
        return json.loads(text)


def report_data(run: Path) -> dict:
    return Page(write_report(run).read_text(encoding="utf-8")).data


def chart(data: dict, name: str) -> dict:
    return next(chart for chart in data["charts"] if chart["id"] == name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "run")


def test_the_headline_says_before_and_after_and_the_verdict(run: Path) -> None:
    data = report_data(run)
    tiles = {tile["label"]: tile for tile in data["tiles"]}
    rows = collect(run).rows
    assert data["title"] == "smollm2-arithmetic"
    assert (tiles["Held-out accuracy"]["before"], tiles["Held-out accuracy"]["value"]) == (
        0.25,
        rows[-1]["eval/accuracy"],
    )
    assert tiles["Held-out form"]["before"] == 0.42
    assert tiles["Worst disagreement"]["value"] == max(row.get("agreement/abs_diff/mean", 0) for row in rows)
    assert data["verdict"] == {
        "text": "agreement held at all 22 steps",
        "level": "good",
        "sentence": f"Last verdict: {rows[-1]['verdict/sentence']}",
    }
    assert data["notes"] == []
    assert data["footer"].endswith("Python 3.11.2 · torch 2.13.0 · transformers 5.19.0 · A CPU")


def test_the_agreement_chart_has_its_bound_and_the_reason(run: Path) -> None:
    agreement = chart(report_data(run), "agreement")
    assert agreement["bound"] == 0.02
    assert agreement["bound_label"] == "bound on abs_diff/mean"
    assert "ten times what the same weights showed" in agreement["note"]
    assert [series["name"] for series in agreement["series"]] == [
        "agreement/abs_diff/mean",
        "agreement/abs_diff/p99",
        "agreement/abs_diff/max",
    ]
    assert agreement["series"][0]["values"][0] is None  # step 0 has only the evaluation
    assert all(value is not None for value in agreement["series"][0]["values"][1:])


def test_every_bounded_metric_has_a_chart_with_its_own_bound(tmp_path: Path) -> None:
    """The last verdict was of the median; the mean keeps its chart and its bound."""
    with RunFolder(tmp_path / "run") as folder:
        for step in (1, 2):
            metric, bound = ("abs_diff/mean", 0.1) if step == 1 else ("abs_diff/p50", 1e-3)
            row: dict[str, int | float | str] = {"step": step, "agreement/metric": metric, "agreement/bound": bound}
            row |= {"agreement/abs_diff/mean": 0.01 * step, "agreement/abs_diff/p50": 1e-4 * step}
            folder.append_metrics(row | {"bound/abs_diff/mean": 0.1, "bound/abs_diff/p50": 1e-3})
    data = report_data(tmp_path / "run")
    judged, other = chart(data, "agreement"), chart(data, "agreement-abs_diff-mean")
    assert (judged["bound_label"], judged["bound"]) == ("bound on abs_diff/p50", 1e-3)
    assert (other["bound_label"], other["bound"]) == ("bound on abs_diff/mean", 0.1)
    assert other["series"][0]["values"] == [0.01, 0.02]
    assert not any(name.startswith("bound/") for name in data["explorer"])


def test_phases_and_the_rest_add_up_to_the_step(run: Path) -> None:
    data = report_data(run)
    time = chart(data, "time")
    assert [series["label"] for series in time["series"]] == [
        "rollout",
        "logprobs",
        "train",
        "optim",
        "refit",
        "eval",
        "save",
        "other",
    ]
    inside = [series["values"] for series in time["series"] if series["label"] != "save"]
    sums = [sum(value for value in column if value is not None) for column in zip(*inside, strict=True)]
    steps = [row.get("time/step_s", 0.0) for row in collect(run).rows]
    np.testing.assert_allclose(sums, steps)
    assert "note" not in time


def test_a_phase_inside_another_is_not_stacked(run: Path) -> None:
    assert any("time/score_s" in row for row in collect(run).rows)
    assert "time/score_s" in explorer_series(collect(run)), "it is there to choose"
    nested = {metric for metric, phase in PHASES.items() if "/" in phase}
    assert {f"time/{phase}_s" for phase in INSIDE_ANOTHER} == nested
    with_another = {metric.removeprefix("time/").removesuffix("_s") for metric in PHASES} - {"step"}
    assert {*charts.PHASES, *INSIDE_ANOTHER} == with_another


def test_overlapping_phases_are_said(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.append_metrics({"step": 1, "time/step_s": 1.0, "time/train_s": 0.9, "time/rollout_s": 0.8})
    assert "overlap" in chart(report_data(tmp_path / "run"), "time")["note"]


def test_receipts_show_what_was_checked_and_what_was_not(run: Path) -> None:
    refits = report_data(run)["refits"]
    assert len(refits["rows"]) == 23
    assert "covered held 23 of 23" in refits["summary"]
    assert "loaded held 4 of 23, not checked 19 of 23" in refits["summary"]
    step, version, weights, transport, num_bytes, seconds, rate, *probes = refits["rows"][1]["cells"]
    assert (step, version, transport, num_bytes) == (1, 1, "local", 269_060_000)
    assert weights is None
    assert probes == [None, None, None], "this run's receipts have no probes"
    assert seconds == pytest.approx(0.001 + 0.11 + 0.02 + 0.09)
    assert refits["columns"][6][0] == "transfer GB/s"
    assert rate == pytest.approx(269_060_000 / 0.11 / 1e9), "as the receipt says it, without the time of its proof"
    assert refits["rows"][2]["claims"][2] == {"name": "loaded", "status": "not checked", "why": "due every 10 steps"}


def test_a_failed_step_shows_in_the_verdict(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with RunFolder(tmp_path / "run") as folder:
        folder.append_metrics(metric_row(1, 3, rng))
        folder.append_metrics(metric_row(2, 3, rng) | {"verdict/status": "stop", "verdict/sentence": "too far"})
    verdict = report_data(tmp_path / "run")["verdict"]
    assert verdict == {"text": "verdicts: 1 pass, 1 stop", "level": "bad", "sentence": "Last verdict: too far"}


def test_nonfinite_numbers_reach_the_page_as_themselves(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.append_metrics({"step": 1, "reward/mean": 0.5, "agreement/abs_diff/mean": 0.01})
        folder.append_metrics({"step": 2, "reward/mean": math.nan, "agreement/abs_diff/mean": math.nan})
        rollout = make_rollout("r", "g", ["a", "NaN"])
        logprobs = noisy(rollout, 0.01)
        logprobs["r/0"][2] = np.nan
        folder.write_rollouts(2, [rollout], logprobs, token_texts)
    data = report_data(tmp_path / "run")
    assert chart(data, "reward")["series"][0]["values"] == [0.5, "NaN"]
    assert next(tile for tile in data["tiles"] if tile["label"] == "Worst disagreement")["value"] == "NaN"
    (sample,) = data["samples"]["steps"]["2"]
    assert sample["diff"][0] == "NaN"
    assert isinstance(sample["diff"][1], float)
    assert sample["tokens"] == ["a", "NaN"]


def test_a_sample_carries_its_tokens_and_exact_small_differences(tmp_path: Path) -> None:
    rollout = make_rollout("r", "g", ["x"] * 3)
    train = rollout.sequences[0].logprobs.copy()
    train[3] = np.nextafter(train[3], np.float32(0))
    with RunFolder(tmp_path / "run") as folder:
        folder.write_rollouts(1, [rollout], {"r/0": train}, token_texts)
    (sample,) = report_data(tmp_path / "run")["samples"]["steps"]["1"]
    expected = float(train[3].astype(np.float64) - rollout.sequences[0].logprobs[3].astype(np.float64))
    assert expected > 0
    assert sample["diff"] == [0.0, pytest.approx(expected, rel=1e-3), 0.0]
    assert sample["prompt"] == "<user>What is 12 + 7?\n"
    assert sample["mask"] == [1, 1, 1]
    assert sample["versions"] == [4, 4, 4]


def test_without_token_texts_the_ids_are_shown_and_without_a_trainer_no_difference(tmp_path: Path) -> None:
    rollout = make_rollout("r", "g", ["x", "y"])
    with RunFolder(tmp_path / "run") as folder:
        folder.write_rollouts(1, [rollout], {})
    (sample,) = report_data(tmp_path / "run")["samples"]["steps"]["1"]
    ids = rollout.sequences[0].tokens[2:].tolist()
    assert sample["tokens"] == [f"⟨{token}⟩" for token in ids]
    assert sample["diff"] == [None, None]
    assert sample["prompt"] == rollout.problem.prompt


# --- missing pieces ---


def test_an_empty_run_makes_a_page_that_says_what_is_missing(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").close()
    data = report_data(tmp_path / "run")
    notes = " ".join(data["notes"])
    for piece in ("config.toml is missing", "environment.json is missing", "metrics.jsonl is empty", "No rollouts"):
        assert piece in notes
    assert data["verdict"]["text"] == "no verdict recorded"
    assert data["title"] == "run"
    assert all(not chart["series"] for chart in data["charts"])


@pytest.mark.parametrize("piece", ["config.toml", "environment.json", "metrics.jsonl", "refits.jsonl"])
def test_any_piece_may_be_missing_and_is_named(tmp_path: Path, piece: str) -> None:
    path = make_run(tmp_path / "run", steps=2)
    (path / piece).unlink()
    notes = report_data(path)["notes"]
    assert [note for note in notes if note.startswith(f"{piece} is missing")]
    assert len(notes) == 1


def test_a_run_that_stopped_early_is_called_unfinished(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.write_config("steps = 20\n")
        folder.append_metrics({"step": 7, "reward/mean": 0.1})
        folder.append_refit(receipt(7))
    (tmp_path / "run/metrics.jsonl").open("a").write('{"step": 8, "rew')
    data = report_data(tmp_path / "run")
    assert any("7 of 20 steps are recorded" in note for note in data["notes"])
    assert data["steps"] == [7]


@pytest.mark.parametrize("content", [(), ("notes.txt",), ("environment.json", "rollouts.txt")])
def test_a_folder_that_no_run_wrote_is_refused_and_left_alone(tmp_path: Path, content: tuple[str, ...]) -> None:
    for name in content:
        (tmp_path / name).write_text("{}")
    with pytest.raises(RunFolderError, match=r"neither config\.toml nor metrics\.jsonl"):
        write_report(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(content)


def test_no_folder_and_broken_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        write_report(tmp_path / "none")
    path = make_run(tmp_path / "run", steps=1)
    (path / "config.toml").write_text("steps = = 3")
    with pytest.raises(ValueError, match=r"config\.toml can't be read as TOML"):
        write_report(path)


# --- limits ---


def test_samples_keep_to_their_budget_and_say_what_is_there(run: Path) -> None:
    collected = collect(run)
    everything = choose_samples(collected)
    assert everything["note"] == "All 352 samples of all 22 recorded steps."
    limited = choose_samples(collected, max_bytes=40_000)
    assert len(json.dumps(limited["steps"], ensure_ascii=False)) < 42_000
    steps = limited["steps"]
    assert isinstance(steps, dict)
    assert {"1", "22"} <= set(steps)
    assert len(steps) < 22
    assert f"samples of steps {', '.join(sorted(steps, key=int))} are in this page, out of 22" in str(limited["note"])


def test_a_very_long_completion_is_cut_and_says_so(tmp_path: Path) -> None:
    rollout = make_rollout("r", "g", ["x"] * (MAX_TOKENS + 5))
    with RunFolder(tmp_path / "run") as folder:
        folder.write_rollouts(1, [rollout], noisy(rollout, 0.1), token_texts)
    (sample,) = report_data(tmp_path / "run")["samples"]["steps"]["1"]
    assert len(sample["tokens"]) == len(sample["diff"]) == MAX_TOKENS
    assert sample["cut"] == "5 further tokens are not on this page."


@given(st.integers(0, 60), st.integers(1, 20))
def test_spread_takes_distinct_steps_and_both_ends(num_steps: int, count: int) -> None:
    steps = list(range(10, 10 + num_steps))
    chosen = spread(steps, count)
    assert len(chosen) == len(set(chosen)) == min(num_steps, count)
    assert set(chosen) <= set(steps)
    if num_steps >= 2 and count >= 2:
        assert chosen[:2] == [steps[-1], steps[0]]


# --- untrusted text ---

NASTY = st.text(st.characters(exclude_categories=()), max_size=30) | st.sampled_from(
    ["</script>", "<!--", "<script>", "]]>", "@data@", "@script@", "\u2028", "\ud800", "&lt;", HOSTILE]
)


@given(st.lists(NASTY, max_size=4))
def test_no_text_can_leave_the_data(texts: list[str]) -> None:
    page = render_page("".join(texts), {"texts": texts, "nan": math.nan})
    encoded = page.encode("utf-8")  # lone surrogates included
    parsed = Page(encoded.decode("utf-8"))
    assert parsed.data == {"texts": texts, "nan": "NaN"}
    assert len(parsed.scripts) == 2
    assert [tag for tag, _ in parsed.tags] == [tag for tag, _ in Page(render_page("", {})).tags]


def test_escaped_json_has_no_sign_that_html_reads() -> None:
    assert not re.search("[<>&\u2028\u2029]", escape_json({"a": HOSTILE, "<b>": ["&"]}))


def test_a_hostile_title_and_metric_names_stay_text(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.write_config(f"name = {json.dumps(HOSTILE)}\n")
    (tmp_path / "run/metrics.jsonl").write_text(json.dumps({"step": 1, HOSTILE: 1.0, "verdict/status": HOSTILE}) + "\n")
    page = Page(write_report(tmp_path / "run").read_text(encoding="utf-8"))
    assert len(page.scripts) == 2
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert page.data["title"] == HOSTILE
    assert HOSTILE in page.data["explorer"]


def test_the_page_fetches_nothing_and_runs_only_its_own_script(run: Path) -> None:
    text = write_report(run).read_text(encoding="utf-8")
    page = Page(text)
    for tag, attributes in page.tags:
        for name in ("src", "href", "action", "srcset"):
            assert attributes.get(name) in (None, "data:,"), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")]
    (policy,) = [a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    scripts = [script for attributes, script in page.scripts if "type" not in attributes]
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|fetch\(|import\(", scripts[0]
    )


def test_the_page_is_small(run: Path) -> None:
    assert write_report(run).stat().st_size < 400_000


def test_the_report_needs_no_torch(run: Path) -> None:
    code = (
        "import sys; from lockstep.metrics.report import write_report; write_report(sys.argv[1]); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(run)], check=True)
