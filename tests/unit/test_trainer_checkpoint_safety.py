"""A checkpoint from elsewhere never runs code, and a full disk is not hidden by torch's wrapper."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from lockstep.train.checkpoint import CheckpointError, load_tensors, save_tensors


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (str(self.path),)


def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.tensor(3)}


def test_round_trip_keeps_every_dtype_that_a_trainer_saves(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
    saved = {str(dtype): torch.tensor([0, 1, 1]).to(dtype) for dtype in dtypes}
    save_tensors(tmp_path / "c", saved)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    load_tensors(tmp_path / "c", loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


def test_metadata_that_would_run_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    folder, trace = tmp_path / "c", tmp_path / "it-ran"
    save_tensors(folder, tensors())
    (folder / ".metadata").write_bytes(pickle.dumps(_Runs(trace)))
    target = tensors()
    with pytest.raises(CheckpointError, match="pathlib"):
        load_tensors(folder, target)
    assert not trace.exists()


def test_file_system_errors_come_through_as_they_are(tmp_path: Path) -> None:
    save_tensors(tmp_path / "c", tensors())
    data = next((tmp_path / "c").glob("*.distcp"))
    data.unlink()
    data.mkdir()
    with pytest.raises(OSError, match="directory"):
        load_tensors(tmp_path / "c", tensors())
