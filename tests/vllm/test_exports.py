"""vLLM loads what ``lockstep export`` and ``lockstep prepare`` write, and serves what a refitted engine serves.

Each family in a process of its own: a MoE needs process groups that an engine without experts does not make.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.checkpoint.export import export_weights
from lockstep.checkpoint.prepare import Preparation, Prepared
from lockstep.checkpoint.progress import Silent
from lockstep.config.prepare_schema import PrepareConfig
from lockstep.model.weights import ModelWeights
from lockstep.refit.transaction import run_refit
from lockstep.refit.transports import LocalTransport
from lockstep.rollout.vllm_engine import VllmEngine
from lockstep.rollout.vllm_folder import folder_config
from lockstep.rollout.vllm_start import VllmSettings, import_vllm
from tests.vllm.models import FAMILIES, greedy_tokens, registry, start_engine, tiny_model
from tests.vllm.refits import NUM_GREEDY, answers

import_vllm()

pytestmark = pytest.mark.lane(
    "stage-a-vllm", hardware={"cpu": "cpu"}, minutes=4, owner="vllm", labels=["refit", "vllm"]
)


def exported(model: Any, folder: Path) -> Path:
    """The folder that ``lockstep export`` writes of a model, in several files."""
    return export_weights(ModelWeights(model, 0), folder_config(model), folder / "model", 200_000)


def prepared(source: Path, target: Path, **settings: Any) -> Prepared:
    """Everything that ``lockstep prepare`` does."""
    return Preparation(PrepareConfig(file_bytes=200_000, **settings), str(source), target, Silent()).run()


def loaded(folder: Path, **more: Any) -> VllmEngine:
    """An engine that loads a folder's own weights."""
    options = {"dtype": "float32", "num_slots": 8, "kv_cache_bytes": 64 << 20, "load_format": "safetensors", **more}
    return VllmEngine(VllmSettings(str(folder), **options), derived=registry())


def compare_plain(family: str) -> None:
    """Greedy tokens and log-probs of an engine on an exported folder, and of one that was refitted."""
    model = tiny_model(family, 3)
    with tempfile.TemporaryDirectory() as name:
        folder = exported(model, Path(name))
        assert len(list(folder.glob("*.safetensors"))) > 1
        from_disk = answers(loaded(folder))
    refitted = start_engine(tiny_model(family, 0), derived=registry())
    before = greedy_tokens(refitted)
    run_refit(ModelWeights(model, 1), refitted.receiver(), LocalTransport(), verify=True)
    mine = answers(refitted)
    assert before != from_disk.greedy, "the other weights are told apart"
    assert mine.same_tokens(from_disk) == NUM_GREEDY
    assert max(mine.difference(from_disk, path) for path in ("prefill", "decode")) <= 1e-5
    print("equal", family)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_folder_serves_what_a_refitted_engine_serves(family: str) -> None:
    code = f"from tests.vllm.test_exports import compare_plain; compare_plain({family!r})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert f"equal {family}" in ran.stdout


def test_a_prepared_fp8_folder_serves_what_a_quantised_refit_serves(tmp_path: Path) -> None:
    """Equal to the bit: the folder's bytes are those that the refit sends."""
    from tests.vllm.fp8_kernel import torch_block_kernel
    from tests.vllm.test_quantised import model_of, start

    model = model_of(5)
    result = prepared(exported(model, tmp_path), tmp_path / "t", quantisation="fp8")
    assert Path(result.engine).name == "quantised"
    with torch_block_kernel():
        fresh = loaded(Path(result.engine), dtype="bfloat16", quantisation="fp8")
    theirs = answers(fresh)
    fresh.close()
    refitted = start(model_of(0))
    assert answers(refitted).greedy != theirs.greedy
    run_refit(ModelWeights(model, 1), refitted.receiver(), LocalTransport(), verify=True)
    mine = answers(refitted)
    refitted.close()
    assert mine.greedy == theirs.greedy
    np.testing.assert_array_equal(mine.prefill, theirs.prefill)
    np.testing.assert_array_equal(mine.decode, theirs.decode)
