"""The report's buckets, worst tokens and route flips, from what a step leaves in ``agreement.jsonl``."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from lockstep.agreement import measure
from lockstep.metrics.report.collect import collect
from lockstep.metrics.report.places import MAX_CONTEXT_CHARACTERS, NUM_WORST, bucket_tables, worst_tokens
from lockstep.metrics.run_folder import AGREEMENT, RunFolder
from lockstep.metrics.sinks import read_jsonl
from lockstep.parity.measure import measure_step
from lockstep.parity.rows import agreement_row, quoted, token_details
from tests.synthetic_run import make_rollout, metric_row, noisy, token_texts
from tests.unit.test_report import chart, report_data


def step_row(step: int, words: list[str], noise: float = 0.1) -> dict[str, object]:
    rollouts = [make_rollout(f"r{step}-{i}", "g", words, seed=step * 10 + i) for i in range(4)]
    train = {key: values for rollout in rollouts for key, values in noisy(rollout, noise, seed=step).items()}
    agreement = measure_step(train, rollouts, 4)
    return agreement_row(agreement, step, token_details(rollouts, lambda ids: "".join(token_texts(np.array(ids)))))


def folder_with(path: Path, rows: list[dict[str, object]]) -> Path:
    rng = np.random.default_rng(0)
    with RunFolder(path) as folder:
        for row in rows:
            folder.append_metrics(metric_row(int(str(row["step"])), 9, rng))
            folder.append_agreement(row)
    return path


def test_buckets_over_all_steps_add_sums_and_counts_not_means(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "buckets": {"position": {"0": [1, 0.4, 0.4], "1": [1, 0.1, 0.1]}}, "worst": []},
        {"step": 2, "buckets": {"position": {"0": [3, 0.0, 0.0], "10-19": [2, 0.2, 0.3]}}, "worst": []},
    ]
    (kind,) = bucket_tables(collect(folder_with(tmp_path / "run", rows)))["kinds"]
    assert kind["labels"] == ["0", "1", "10-19"]
    assert kind["steps"]["all"] == [[4, pytest.approx(0.1), 0.4], [1, 0.1, 0.1], [2, 0.2, 0.3]]
    assert kind["steps"]["2"] == [[3, 0.0, 0.0], None, [2, 0.2, 0.3]]


def test_a_step_leaves_the_buckets_of_its_measurement(tmp_path: Path) -> None:
    rows = [step_row(step, [f" {i}" for i in range(6)]) for step in (1, 2)]
    data = report_data(folder_with(tmp_path / "run", rows))
    kinds = {kind["kind"]: kind for kind in data["buckets"]["kinds"]}
    assert set(kinds) == {"position", "decile", "replica", "version"}
    assert kinds["position"]["labels"] == ["0", "1", "2-3", "4-7"]
    assert [cell[0] for cell in kinds["position"]["steps"]["all"]] == [8, 8, 16, 16]
    assert data["buckets"]["note"] == "2 steps, together or one by one."


def test_the_worst_tokens_come_with_the_text_around_them_non_finite_ones_first(tmp_path: Path) -> None:
    rows = [step_row(1, ["a", "b", "NaN", "c"]), step_row(2, ["d", "e"], noise=3.0)]
    broken = make_rollout("x", "g", ["a", "b", "NaN", "c"])
    train = noisy(broken, 0.0)
    train["x/0"][4] = math.nan
    agreement = measure_step(train, [broken], 4)
    rows.append(agreement_row(agreement, 3, token_details([broken], lambda ids: "".join(token_texts(np.array(ids))))))
    worst = worst_tokens(collect(folder_with(tmp_path / "run", rows)))
    first = worst[0]
    assert (first["step"], first["sequence_id"], first["token"]) == (3, "x/0", 4)
    assert first["text"] == "NaN"
    assert str(first["before"]).endswith("ab")
    assert first["after"] == "c"
    assert len(worst) <= NUM_WORST
    sizes = [abs(float(str(token["diff"]))) for token in worst[1:]]
    assert sizes == sorted(sizes, reverse=True)
    assert worst[1]["step"] == 2


def test_long_context_is_cut_on_the_side_away_from_the_token(tmp_path: Path) -> None:
    texts = {"before": quoted("x" * 999 + "y"), "text": quoted("t"), "after": quoted("z" + "x" * 999)}
    token = {"train": -1.0, "rollout": -2.0, **texts}
    row = {"step": 1, "buckets": {}, "worst": [token]}
    (shown,) = worst_tokens(collect(folder_with(tmp_path / "run", [row])))
    assert str(shown["before"]).endswith("xy")
    assert str(shown["after"]).startswith("zx")
    assert max(len(str(shown[name])) for name in ("before", "after")) <= MAX_CONTEXT_CHARACTERS + 1


def test_route_flips_are_a_chart_only_where_both_sides_recorded_experts(tmp_path: Path) -> None:
    ids = np.zeros((2, 1, 1), dtype=np.uint8)
    values = np.array([-1.0, -2.0])
    agreement = measure(values, values, np.ones(2), train_routes=ids, rollout_routes=np.array([[[0]], [[1]]]))
    with RunFolder(tmp_path / "moe") as folder:
        folder.append_metrics({"step": 1, **agreement.flat()})
        folder.append_agreement(agreement_row(agreement, 1, lambda pair: {"token": pair.column}))
    data = report_data(tmp_path / "moe")
    assert chart(data, "routes")["series"][0]["values"] == [0.5]
    (routes,) = [kind for kind in data["buckets"]["kinds"] if kind["kind"] == "routes"]
    assert routes["labels"] == ["equal", "flipped"]
    dense = report_data(folder_with(tmp_path / "dense", [step_row(1, ["a", "b"])]))
    assert "routes" not in {found["id"] for found in dense["charts"]}


def test_a_run_without_recorded_buckets_says_so(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.append_metrics({"step": 1})
    data = report_data(tmp_path / "run")
    assert data["buckets"] == {"kinds": [], "note": "No differences by place were recorded in this run."}
    assert data["worst"] == []


def test_lines_of_later_steps_move_aside_on_a_rewind(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        for step in (1, 2, 3):
            folder.append_agreement({"step": step})
        aside = folder.rewind(1)
        assert aside is not None
        assert [row["step"] for row in read_jsonl(folder.path / AGREEMENT)] == [1]
        assert [row["step"] for row in read_jsonl(aside / AGREEMENT)] == [2, 3]
        with pytest.raises(ValueError, match="whole number 'step'"):
            folder.append_agreement({"buckets": {}})
