"""A checkpoint from elsewhere never runs code, and a full disk is not hidden by torch's wrapper."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.train.checkpoint import TrainerStateError, load_tensors, save_tensors


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
    with pytest.raises(TrainerStateError, match="pathlib"):
        load_tensors(folder, target)
    assert not trace.exists()


def test_file_system_errors_come_through_as_they_are(tmp_path: Path) -> None:
    save_tensors(tmp_path / "c", tensors())
    data = next((tmp_path / "c").glob("*.distcp"))
    data.unlink()
    data.mkdir()
    with pytest.raises(OSError, match="directory"):
        load_tensors(tmp_path / "c", tensors())


# The limit also holds for standard output unless that is a pipe, as it is here.
_SAVE_UNDER_LIMITS = """
import json, resource, signal, sys
from pathlib import Path
import torch
from lockstep.train.checkpoint import save_tensors
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit fails with EFBIG then, as on a full disk
outcomes = {}
for limit in json.loads(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        save_tensors(Path(sys.argv[1]) / str(limit), {f"t{i}": torch.ones(2000 + i) for i in range(50)})
        outcomes[limit] = "saved"
    except Exception as error:
        outcomes[limit] = [isinstance(error, OSError), getattr(error, "errno", None), str(error)]
print(json.dumps(outcomes))
"""


def test_a_disk_that_fills_up_at_any_byte_of_a_save_is_an_os_error(tmp_path: Path) -> None:
    """Fault of torch.save: its clean-up raises a RuntimeError about its archive in place of the write's error."""
    limits = [0, 100, 704, 1_000, 2_000, 9_000, 30_000, 100_000, 300_000, 400_000, 4_000_000]
    command = [sys.executable, "-c", _SAVE_UNDER_LIMITS, str(tmp_path), json.dumps(limits)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    outcomes = json.loads(done.stdout)
    assert outcomes.pop("4000000") == "saved"
    wrong = {limit: outcome for limit, outcome in outcomes.items() if outcome[:2] != [True, errno.EFBIG]}
    assert len(outcomes) == 10
    assert not wrong


def test_a_failed_write_without_a_file_system_error_behind_it_stays_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        try:
            raise KeyError("first")
        except KeyError:
            raise RuntimeError("second")  # noqa: B904

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RuntimeError, match="second"):
        save_tensors(tmp_path / "c", tensors())
