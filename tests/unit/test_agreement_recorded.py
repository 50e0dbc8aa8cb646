"""Recorded files: the same numbers as ``measure`` in every layout, clear refusals, and the page about them."""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.agreement import measure
from lockstep.metrics.report.recorded import write_recorded_report
from lockstep.parity import columns
from lockstep.parity.recorded import RecordedError, measure_file
from lockstep.parity.rows import unquoted
from tests.synthetic_run import HOSTILE, make_run
from tests.unit.test_report import Page

ROWS = 6


def case(seed: int = 0) -> dict[str, list]:
    """Columns with rows: two steps of three sequences, the first two of each one rollout."""
    rng = np.random.default_rng(seed)
    lengths = [5, 3, 8, 2, 6, 4]
    rollout = [(-rng.exponential(1.5, n)).astype(np.float32) for n in lengths]
    return {
        "train_logprobs": [(r + 0.1 * rng.standard_normal(len(r))).astype(np.float32) for r in rollout],
        "rollout_logprobs": rollout,
        "loss_mask": [rng.random(n) < 0.8 for n in lengths],
        "versions": [np.where(rng.random(n) < 0.2, 3, 4) for n in lengths],
        "step": [1, 1, 1, 2, 2, 2],
        "trainer_version": [4] * ROWS,
        "rollout_id": ["a", "a", "b"] * 2,
        "replica": [0, 1, 0, 1, 0, 1],
        "tokens": [np.arange(n) for n in lengths],
        "token_texts": [[f" w{i}" for i in range(n)] for n in lengths],
    }


def write_parquet(path: Path, rows: dict[str, list]) -> Path:
    pq.write_table(pa.table({name: pa.array([v.tolist() if isinstance(v, np.ndarray) else v for v in values])
                             for name, values in rows.items()}), path)  # fmt: skip
    return path


def flat_of(rows: dict[str, list]) -> dict[str, np.ndarray]:
    lengths = [len(v) for v in rows["train_logprobs"]]
    flat = {n: np.repeat(np.array(v), lengths) if n in columns.BY_ROW else np.concatenate(v) for n, v in rows.items()}
    return flat | {"sequence_id": np.repeat(np.arange(len(lengths)), lengths)}


def padded(rows: dict[str, list]) -> dict[str, np.ndarray]:
    def pad(name: str, values: list) -> np.ndarray:
        fill = math.nan if name.endswith("logprobs") else "" if name == "token_texts" else 0
        out = np.full((len(values), 8), fill, dtype=np.array(values[0]).dtype if name != "token_texts" else "<U8")
        for i, row in enumerate(values):
            out[i, : len(row)] = row
        return out

    return {n: np.array(v) if n in columns.BY_ROW else pad(n, v) for n, v in rows.items()}


def step_of(rows: dict[str, list], step: int):
    own = {name: [v for v, s in zip(values, rows["step"], strict=True) if s == step] for name, values in rows.items()}
    return measure(
        own["train_logprobs"], own["rollout_logprobs"], own["loss_mask"], rollout_ids=own["rollout_id"],
        replicas=own["replica"], versions=own["versions"], version=4,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["parquet rows", "parquet flat", "npz padded", "npz flat"])
def test_every_layout_gives_the_numbers_of_measure(tmp_path: Path, layout: str) -> None:
    rows = case()
    if layout == "parquet rows":
        path = write_parquet(tmp_path / "x.parquet", rows)
    elif layout == "parquet flat":
        path = tmp_path / "x.parquet"
        pq.write_table(pa.table({name: pa.array(values) for name, values in flat_of(rows).items()}), path)
    else:
        path = tmp_path / "x.npz"
        np.savez(path, **(padded(rows) if layout == "npz padded" else flat_of(rows)))
    recorded = measure_file(path)
    assert [step.step for step in recorded.steps] == [1, 2]
    for step in recorded.steps:
        expected = step_of(rows, step.step)
        assert step.agreement.metrics == pytest.approx(expected.metrics, rel=1e-12)
        assert step.agreement.num_stale == expected.num_stale > 0
        assert step.agreement.buckets == expected.buckets
    assert recorded.whole.num_tokens == sum(step.agreement.num_tokens for step in recorded.steps)


def test_worst_tokens_are_told_with_their_text(tmp_path: Path) -> None:
    rows = case()
    rows["loss_mask"][4][:] = True
    rows["versions"][4][:] = 4
    rows["train_logprobs"][4][3] += 5
    (token, *_) = measure_file(write_parquet(tmp_path / "x.parquet", rows)).steps[1].row["worst"]
    assert [unquoted(token[name]) for name in ("before", "text", "after")] == [" w0 w1 w2", " w3", " w4 w5"]
    assert (token["token"], token["id"], token["rollout_id"], token["version"]) == (3, 3, "a", 4)


def test_the_rollouts_of_a_run_folder_can_be_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    recorded = measure_file(run / "rollouts" / "step-000002.parquet")
    assert recorded.whole.num_tokens > 50
    assert any("trainer_version" in note for note in recorded.notes)


def test_the_smallest_file_has_two_columns_and_says_what_it_can_not_tell(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", train_logprobs=np.array([-1.0, -2.0]), rollout_logprobs=np.array([-1.5, -2.0]))
    recorded = measure_file(tmp_path / "x.npz")
    assert recorded.whole.metrics["abs_diff/mean"] == 0.25
    assert "seq_sum/max" not in recorded.whole.metrics
    assert any("loss_mask" in note for note in recorded.notes)
    assert any("sequence_id" in note for note in recorded.notes)


@pytest.mark.parametrize("change", [np.negative, np.exp])
def test_values_that_are_no_logprobs_are_doubted(tmp_path: Path, change) -> None:
    good = {"rollout_logprobs": np.array([-1.0, -2.0]), "loss_mask": np.array([1, 0])}
    np.savez(tmp_path / "good.npz", train_logprobs=np.array([1e-6, 5.0]), **good)
    assert not any("no log-prob is" in note for note in measure_file(tmp_path / "good.npz").notes)
    np.savez(tmp_path / "bad.npz", train_logprobs=change(np.array([-1.0, -2.0])), **good)
    (doubt,) = [note for note in measure_file(tmp_path / "bad.npz").notes if "no log-prob is" in note]
    assert "train_logprobs is above 0 for 1 of 1 sampled tokens" in doubt


def test_expert_ids_in_an_npz_give_route_agreement(tmp_path: Path) -> None:
    ids = np.array([[[0, 1]], [[2, 3]], [[255, 255]]], dtype=np.uint8)
    other = np.array([[[1, 0]], [[2, 5]], [[1, 2]]], dtype=np.uint8)
    values = np.array([-1.0, -2.0, -3.0])
    np.savez(tmp_path / "x.npz", train_logprobs=values, rollout_logprobs=values, train_routes=ids, rollout_routes=other)
    assert measure_file(tmp_path / "x.npz").whole.metrics["route_agree"] == 0.5


VALUES = np.array([-1.0, -2.0])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"train_logprobs": VALUES}, "column rollout_logprobs is missing"),
        ({"train_logprobs": VALUES, "rollout_logprobs": np.array([-1.0])}, r"rollout_logprobs has the shape \[1\]"),
        ({"train_logprobs": np.array([1, 2]), "rollout_logprobs": VALUES}, "train_logprobs must hold float"),
        ({"train_logprobs": VALUES, "rollout_logprobs": VALUES, "loss_mask": np.array([0, 7])}, "loss_mask holds"),
        ({"train_logprobs": VALUES, "rollout_logprobs": VALUES, "train_top1": np.array([0, 7])}, "belong together"),
        ({"train_logprobs": VALUES[None, None], "rollout_logprobs": VALUES[None, None]}, r"must be \[N\] or \[B, T\]"),
        ({"train_logprobs": VALUES[:0], "rollout_logprobs": VALUES[:0]}, "not a single token"),
        (
            {"train_logprobs": VALUES, "rollout_logprobs": VALUES, "versions": np.array([1, 1]),
             "trainer_version": np.array([1, 2])}, "trainer_version has the values"),
        (
            {"train_logprobs": VALUES, "rollout_logprobs": VALUES, "positions": np.array([-1, 0])},
            "step 1: positions holds -1"),
        (
            {"train_logprobs": VALUES, "rollout_logprobs": VALUES, "train_routes": np.zeros((2, 1, 1), np.uint8),
             "rollout_routes": np.zeros((2, 1, 2), np.uint8)}, "step 1: train_routes and rollout_routes have"),
    ],
)  # fmt: skip
def test_a_wrong_npz_is_refused_with_the_column(tmp_path: Path, arrays: dict, message: str) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(RecordedError, match=message):
        measure_file(tmp_path / "x.npz")


class Bomb:
    """Unpickling it leaves a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("column", ["train_logprobs", "sequence_id"])
def test_nothing_is_ever_unpickled(tmp_path: Path, column: str) -> None:
    bomb, fine = np.empty(2, dtype=object), {"train_logprobs": VALUES, "rollout_logprobs": VALUES}
    bomb[:] = [Bomb(tmp_path / "exploded"), 1]
    np.savez(tmp_path / "x.npz", **(fine | {column: bomb}))
    assert pickle.dumps(bomb)  # the bomb is one: it is in the file
    with pytest.raises(RecordedError, match=f"column {column} holds Python objects"):
        measure_file(tmp_path / "x.npz")
    assert not (tmp_path / "exploded").exists()


def test_a_file_that_claims_to_be_huge_is_refused_before_it_is_read(tmp_path: Path) -> None:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (900000000000,), }"
    raw = b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header + b"\n"
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for name in ("train_logprobs", "rollout_logprobs"):
            archive.writestr(f"{name}.npy", raw)
    with pytest.raises(RecordedError, match="split the file by step"):
        measure_file(tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.pop("rollout_logprobs"), "column rollout_logprobs is missing"),
        (lambda rows: rows["loss_mask"].__setitem__(2, [True]), "column loss_mask has 1 tokens in row 2"),
        (lambda rows: rows.__setitem__("versions", [1] * ROWS), "column versions needs a list per row"),
        (lambda rows: rows.__setitem__("rollout_id", [["a"]] * ROWS), "column rollout_id needs a single value per row"),
        (lambda rows: rows["rollout_logprobs"].__setitem__(0, None), "column rollout_logprobs is null in 1 rows"),
        (lambda rows: rows["rollout_logprobs"].__setitem__(0, [None] * 5), "column rollout_logprobs holds 5 nulls"),
        (lambda rows: rows["replica"].__setitem__(0, None), "column replica holds 1 nulls; each token or row needs"),
        (lambda rows: rows.__setitem__("tokens", [["x"]] * ROWS), "column tokens must hold int values, its type is"),
    ],
)
def test_a_wrong_parquet_is_refused_with_the_column(tmp_path: Path, change, message: str) -> None:
    rows = case()
    change(rows)
    with pytest.raises(RecordedError, match=message):
        measure_file(write_parquet(tmp_path / "x.parquet", rows))


@pytest.mark.parametrize("name", ["x.npz", "x.parquet", "x.csv"])
def test_other_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not such a file at all")
    with pytest.raises(RecordedError, match=r"can't be read as|is needed"):
        measure_file(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        measure_file(tmp_path / f"no-{name}")


def damaged(path: Path, how: str) -> Path:
    """An .npz whose directory and headers are whole and whose data is not."""
    values = np.linspace(-9.0, -1.0, 2000)
    save = np.savez_compressed if how == "compressed" else np.savez
    save(path, train_logprobs=values, rollout_logprobs=values)
    if how == "short":
        header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (2000,), }\n"
        raw = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + values.tobytes()[:80]
        with zipfile.ZipFile(path, "w") as archive:
            for name in ("train_logprobs", "rollout_logprobs"):
                archive.writestr(f"{name}.npy", raw)
        return path
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0xFF
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("how", ["compressed", "stored", "short"])
def test_damage_behind_the_headers_is_told_as_such(tmp_path: Path, how: str) -> None:
    with pytest.raises(RecordedError, match=r"can't be read as \.npz"):
        measure_file(damaged(tmp_path / "x.npz", how))


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    names = ["train_logprobs", "rollout_logprobs", "rollout_logprobs"]
    pq.write_table(pa.table([pa.array(VALUES)] * 3, names=names), tmp_path / "x.parquet")
    with pytest.raises(RecordedError, match="column rollout_logprobs is there twice"):
        measure_file(tmp_path / "x.parquet")


@pytest.mark.parametrize("kind", [">f8", ">f4", "longdouble"])
def test_an_npz_of_another_machine_is_read(tmp_path: Path, kind: str) -> None:
    np.savez(tmp_path / "x.npz", train_logprobs=VALUES.astype(kind), rollout_logprobs=(VALUES - 0.5).astype(kind))
    assert measure_file(tmp_path / "x.npz").whole.metrics["abs_diff/mean"] == 0.5


def test_texts_of_tokens_that_end_within_a_character_are_read(tmp_path: Path) -> None:
    texts = np.array([b"\xe2\x82", "é".encode()])
    np.savez(tmp_path / "x.npz", train_logprobs=VALUES, rollout_logprobs=VALUES - [0, 1], token_texts=texts)
    worst = measure_file(tmp_path / "x.npz").steps[0].row["worst"]
    assert isinstance(worst, list)
    assert unquoted(worst[0]["text"]) == "é"


@pytest.mark.parametrize(
    ("given", "missing"),
    [(["versions"], "trainer_version"), (["kv_versions"], "trainer_version"), (["trainer_version"], "versions")],
)
def test_versions_of_one_side_alone_are_said_to_decide_nothing(tmp_path: Path, given: list, missing: str) -> None:
    ones: dict = dict.fromkeys(given, np.ones(2, dtype=np.int64))
    np.savez(tmp_path / "x.npz", train_logprobs=VALUES, rollout_logprobs=VALUES, **ones)
    told = f"There is no column {missing}: stale tokens can't be told from numerical mismatch."
    assert told in measure_file(tmp_path / "x.npz").notes
    whole: dict = ones | {missing: np.ones(2, dtype=np.int64)}
    np.savez(tmp_path / "y.npz", train_logprobs=VALUES, rollout_logprobs=VALUES, **whole)
    assert not any("stale" in note for note in measure_file(tmp_path / "y.npz").notes)


def test_rows_the_trainer_did_not_see_are_left_out_and_said(tmp_path: Path) -> None:
    rows = case()
    rows["train_logprobs"][0] = None
    recorded = measure_file(write_parquet(tmp_path / "x.parquet", rows))
    assert "1 rows without the trainer's log-probs are left out." in recorded.notes
    seen = {name: values[1:] for name, values in rows.items()}
    assert recorded.steps[0].agreement.metrics == pytest.approx(step_of(seen, 1).metrics)


def test_the_page_shows_numbers_buckets_and_worst_tokens_and_escapes_text(tmp_path: Path) -> None:
    rows = case()
    rows["token_texts"][4][3] = HOSTILE
    rows["loss_mask"][4][3], rows["train_logprobs"][4][3] = True, math.nan
    path, _ = write_recorded_report(write_parquet(tmp_path / "x.parquet", rows))
    assert path == tmp_path / "x.html"
    page = Page(path.read_text(encoding="utf-8"))
    assert [attributes.get("src") for _, attributes in page.tags if attributes.get("src")] == []
    assert len(page.scripts) == 2
    data = page.data
    numbers = dict(data["numbers"])
    assert numbers["nonfinite"] == 1
    assert numbers["abs_diff/mean"] > 0
    assert data["worst"][0]["text"] == HOSTILE
    assert data["worst"][0]["train"] == "NaN"
    assert {kind["kind"] for kind in data["buckets"]["kinds"]} == {"position", "decile", "replica", "version"}
    assert [chart["id"] for chart in data["charts"]] == ["agreement"]
    assert json.dumps(data["steps"]) == "[1, 2]"
