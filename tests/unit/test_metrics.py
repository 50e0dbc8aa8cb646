"""Names and values of metrics, and the file they are appended to."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.metrics import sinks
from lockstep.metrics.metric import (
    NONFINITE_TEXTS,
    check_name,
    check_row,
    decode_nonfinite,
    encode_nonfinite,
    unit_of,
)
from lockstep.metrics.sinks import JsonlSink, read_jsonl

TEXT = st.text().filter(lambda text: text not in NONFINITE_TEXTS)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def same(a: object, b: object) -> bool:
    """Equality in which NaN equals itself and 1 differs from 1.0 and True."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


# --- the law ---


@pytest.mark.parametrize("name", ["step", "reward/mean", "agreement/abs_diff/p99", "time/rollout_s", "agreement/k3"])
def test_names_of_the_law_pass(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["Reward", "reward-mean", "/reward", "reward/", "reward//mean", "", "räward", "a b"])
def test_other_names_are_refused_with_the_law(name: str) -> None:
    with pytest.raises(ValueError, match="lower-case words"):
        check_name(name)


def test_units_are_read_from_the_name() -> None:
    names = ("time/step_s", "memory/peak_rss_bytes", "throughput/generated_tokens_per_s", "tokens/loss_tokens")
    assert [unit_of(name) for name in names] == ["s", "bytes", "tokens/s", "tokens"]
    assert unit_of("reward/mean") is None


def test_numpy_scalars_become_numbers_and_absence_is_no_value() -> None:
    row = check_row({"step": np.int64(3), "reward/mean": np.float32(0.5), "done": np.bool_(True)})
    assert same(row, {"step": 3, "reward/mean": 0.5, "done": True})
    with pytest.raises(ValueError, match=r"reward/mean: NoneType .* leave out"):
        check_row({"reward/mean": None})
    with pytest.raises(ValueError, match="reward/mean: list"):
        check_row({"reward/mean": [1.0]})


@given(JSON_VALUES)
def test_any_value_survives_strict_json(value: object) -> None:
    text = json.dumps(encode_nonfinite(value), allow_nan=False)
    assert same(decode_nonfinite(json.loads(text)), value)


def test_text_that_reads_like_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="reserved"):
        encode_nonfinite({"verdict/status": "NaN"})


# --- the file ---


def test_a_row_is_on_the_disk_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync
    with JsonlSink(tmp_path / "m.jsonl", "step") as sink:
        monkeypatch.setattr(sinks.os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
        sink.append({"step": 1, "loss": math.nan})
        assert synced == [str(tmp_path / "m.jsonl")]
        assert same(read_jsonl(tmp_path / "m.jsonl"), [{"step": 1, "loss": math.nan}])


def test_nan_is_valid_json_in_the_file_and_not_zero(tmp_path: Path) -> None:
    with JsonlSink(tmp_path / "m.jsonl") as sink:
        sink.append({"loss": math.nan, "high": math.inf})
    strict = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert strict == {"loss": "NaN", "high": "Infinity"}


def test_a_half_written_last_line_is_cut_and_said_at_every_length(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "m.jsonl"
    with JsonlSink(path, "step") as sink:
        sink.append({"step": 1, "text": "äöü"})
        first = path.read_bytes()
        sink.append({"step": 2, "text": "äöü"})
        whole = path.read_bytes()
    for length in range(len(first) + 1, len(whole) - 1):
        path.write_bytes(whole[:length])
        caplog.clear()
        with caplog.at_level(logging.WARNING), JsonlSink(path, "step") as sink:
            assert sink.num_cut_bytes == length - len(first)
            assert "cut an unfinished last line" in caplog.text
            assert path.read_bytes() == first
            sink.append({"step": 2, "text": "again"})
        assert [row["step"] for row in read_jsonl(path)] == [1, 2]


def test_a_whole_last_row_without_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    with JsonlSink(path, "step") as sink:
        sink.append({"step": 3})
    assert [row["step"] for row in read_jsonl(path)] == [1, 2, 3]


def test_a_last_line_of_zeros_from_a_machine_crash_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + b"\0" * 40 + b"\n")
    with JsonlSink(path, "step"):
        assert path.read_bytes() == b'{"step": 1}\n'


def test_damage_before_the_last_line_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2: not a JSON object"):
        JsonlSink(path, "step")
    assert path.read_text().count("\n") == 3


def test_a_reader_sees_only_whole_rows_of_a_growing_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"ste')
    assert read_jsonl(path) == [{"step": 1}]


@pytest.mark.parametrize("second", [1, 2])
def test_steps_only_go_forward_also_after_reopening(tmp_path: Path, second: int) -> None:
    path = tmp_path / "m.jsonl"
    with JsonlSink(path, "step") as sink:
        sink.append({"step": 2})
    with JsonlSink(path, "step") as sink, pytest.raises(ValueError, match="rows only go forward"):
        sink.append({"step": second})
    assert len(read_jsonl(path)) == 1


def test_a_row_without_its_step_is_refused(tmp_path: Path) -> None:
    with JsonlSink(tmp_path / "m.jsonl", "step") as sink, pytest.raises(ValueError, match="whole number 'step'"):
        sink.append({"step": 1.5})


def test_rewind_keeps_dropped_rows_beside_and_goes_on(tmp_path: Path) -> None:
    path, side = tmp_path / "m.jsonl", tmp_path / "side.jsonl"
    with JsonlSink(path, "step") as sink:
        for step in range(5):
            sink.append({"step": step, "loss": math.nan})
        assert sink.rewind(lambda row: row["step"] <= 2, side) == 2
        sink.append({"step": 3, "loss": 0.5})
    assert [row["step"] for row in read_jsonl(path)] == [0, 1, 2, 3]
    assert [row["step"] for row in read_jsonl(side)] == [3, 4]
    assert path.read_bytes().endswith(b'{"step": 3, "loss": 0.5}\n')


def test_rewind_without_later_rows_changes_nothing(tmp_path: Path) -> None:
    with JsonlSink(tmp_path / "m.jsonl", "step") as sink:
        sink.append({"step": 1})
        assert sink.rewind(lambda row: True, tmp_path / "side.jsonl") == 0
    assert not (tmp_path / "side.jsonl").exists()


def test_a_crash_between_the_two_files_of_a_rewind_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "m.jsonl", []
    real = sinks.replace_text

    def crash_at_second(target: Path, text: str) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(target, text)

    with JsonlSink(path, "step") as sink:
        for step in range(4):
            sink.append({"step": step})
        monkeypatch.setattr(sinks, "replace_text", crash_at_second)
        with pytest.raises(KeyboardInterrupt):
            sink.rewind(lambda row: row["step"] <= 1, tmp_path / "side.jsonl")
    assert [row["step"] for row in read_jsonl(path)] == [0, 1, 2, 3]
    assert [row["step"] for row in read_jsonl(tmp_path / "side.jsonl")] == [2, 3]


def test_a_really_full_file_undoes_the_row_and_says_which_file(tmp_path: Path) -> None:
    """The kernel refuses bytes past the limit, in the middle of the row."""
    path = tmp_path / "m.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with JsonlSink(path, "step") as sink:
            sink.append({"step": 1})
            before = path.read_bytes()
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
            with pytest.raises(OSError, match="could not append a row") as caught:
                sink.append({"step": 2, "text": "x" * 100})
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert caught.value.errno == errno.EFBIG
            assert str(path) in str(caught.value)
            assert path.read_bytes() == before
            sink.append({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert [row["step"] for row in read_jsonl(path)] == [1, 2]
