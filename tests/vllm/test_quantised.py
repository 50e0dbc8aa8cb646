"""fp8 refits into vLLM: through its own loaders and its own post-processing, equal to an engine loaded from a quantised
checkpoint. The product itself is ours where this CPU has none (``fp8_kernel.py``)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lockstep.config.schema import TrainerConfig
from lockstep.model.weights import ModelWeights
from lockstep.records import Quantisation
from lockstep.refit.names import as_checkpoint
from lockstep.refit.probes import holding
from lockstep.refit.quantised import quantised, served_weights
from lockstep.refit.quantised_config import served_section
from lockstep.refit.transaction import RefitError, run_refit
from lockstep.refit.transports import LocalTransport
from lockstep.rollout.vllm_engine import VllmEngine
from lockstep.rollout.vllm_folder import write_model_folder
from lockstep.rollout.vllm_hooks import served_model
from lockstep.rollout.vllm_start import VllmSettings, import_vllm
from lockstep.train.fsdp import FsdpTrainer
from tests.vllm.models import registry, tiny_model
from tests.vllm.refits import Answers, answers, probes

import_vllm()

from tests.vllm.fp8_kernel import torch_block_kernel  # noqa: E402 - vLLM reads its environment when it is imported

pytestmark = pytest.mark.lane(
    "stage-a-vllm", hardware={"cpu": "cpu"}, minutes=2, owner="vllm", labels=["refit", "vllm"]
)

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
NEAR = 0.03
"""Mean difference of two bfloat16 programs on these weights, with room: 0.010 is seen. fp8 itself moves them by 0.1."""


def model_of(seed: int, family: str = "qwen3", **more: Any) -> Any:
    return tiny_model(family, seed, torch.bfloat16, **SIZES, **more)


def start(model: Any, scheme: Quantisation = "fp8", *, weights: bool = False) -> VllmEngine:
    """An fp8 engine: with random weights, or loaded from a quantised checkpoint of ``model``'s."""
    source = as_checkpoint(ModelWeights(model, 0))
    with tempfile.TemporaryDirectory() as name, torch_block_kernel():
        folder = write_model_folder(model, Path(name), quantisation=served_section(source.manifest(), scheme))
        if weights:
            tensors = {one: _saved(tensor) for one, _, _, tensor in quantised(source, scheme).shards()}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        settings = VllmSettings(
            str(folder),
            dtype="bfloat16",
            num_slots=8,
            kv_cache_bytes=64 << 20,
            load_format="safetensors" if weights else "dummy",
            quantisation=scheme,
        )
        return VllmEngine(settings, derived=registry())


def _saved(tensor: torch.Tensor) -> torch.Tensor:
    """As published checkpoints have it: DeepSeek-V3.1 keeps its power-of-two scales in float32."""
    return (tensor.float() if tensor.dtype == torch.float8_e8m0fnu else tensor).contiguous()


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    started = start(model_of(0))
    yield started
    started.close()


def reference(seed: int, scheme: Quantisation = "fp8", *, dequantised: bool) -> np.ndarray:
    """The trainer's log-probs of the probes, of its own weights or of what ``scheme`` makes of them."""
    trainer = FsdpTrainer(model_of(seed), TrainerConfig(), total_optimizer_steps=1, temperature=1.0)
    sequences = list(probes())
    if dequantised:
        with holding(trainer.model, served_weights(trainer.weights(), scheme)):
            scored = trainer.logprobs(sequences)
    else:
        scored = trainer.logprobs(sequences)
    return np.concatenate([scored[s.sequence_id].logprobs[1:] for s in sequences])


def refitted(engine: VllmEngine, scheme: Quantisation, seed: int, version: int) -> Answers:
    """Refit with the weights of ``seed`` (5 or 0); the engine then answers as the trainer with those dequantised."""
    receipt = run_refit(ModelWeights(model_of(seed), version), engine.receiver(), LocalTransport(), verify=True)
    statuses = {claim.name: claim.status for claim in receipt.claims}
    assert (statuses["covered"], statuses["loaded"], statuses["derived"]) == ("held", "held", "held")
    mine = answers(engine)
    near, far = (reference(one, scheme, dequantised=True) for one in (seed, 5 - seed))
    for path in ("prefill", "decode"):
        assert np.abs(getattr(mine, path) - near).mean() < NEAR
        assert np.abs(getattr(mine, path) - far).mean() > 10 * NEAR, "the other weights are told apart"
    return mine


@pytest.mark.parametrize("scheme", ["fp8", "fp8_ue8m0"])
def test_refits_serve_what_a_quantised_checkpoint_serves_and_what_the_trainer_dequantises(scheme: Quantisation) -> None:
    engine = start(model_of(0), scheme)
    shapes = {
        tuple(m.weight_scale_inv.shape) for m in served_model(engine.llm).modules() if hasattr(m, "weight_scale_inv")
    }
    assert shapes == {(4, 4)}, "the kernel pads scales, and the next update must fit all the same (C9)"
    for version, seed in enumerate((5, 0, 5), start=1):
        refitted(engine, scheme, seed, version)
    mine = refitted(engine, scheme, 0, 4)
    engine.close()
    assert np.abs(mine.prefill - reference(0, scheme, dequantised=False)).mean() > NEAR, "fp8 is not the trainer's own"
    fresh = start(model_of(0), scheme, weights=True)
    theirs = answers(fresh)
    fresh.close()
    assert mine.greedy == theirs.greedy
    np.testing.assert_array_equal(mine.prefill, theirs.prefill)
    np.testing.assert_array_equal(mine.decode, theirs.decode)


def test_plain_weights_are_refused_before_a_byte_moves(engine: VllmEngine) -> None:
    run_refit(ModelWeights(model_of(0), 20), engine.receiver(), LocalTransport(), verify=False)
    before = answers(engine)
    plain = as_checkpoint(ModelWeights(model_of(5), 21))
    with pytest.raises(Exception, match="quantised 'none', this engine serves 'fp8'"):
        engine.receiver().begin(plain.manifest())
    assert engine.version == 20
    np.testing.assert_array_equal(answers(engine).prefill, before.prefill)


def test_a_layer_that_is_not_laid_out_again_fails_a_claim(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's transpose is skipped for one layer at the reload: shapes agree, the matrix is square."""
    from tests.vllm.fp8_kernel import TorchBlockKernel

    original, skipped = TorchBlockKernel.process_weights_after_loading, []

    def skipping(self: Any, layer: Any) -> None:
        if layer.weight.shape[0] == layer.weight.shape[1] and not skipped:
            skipped.append(layer)
            layer.weight.data = layer.weight.data.t().contiguous()  # and back again
        original(self, layer)

    monkeypatch.setattr(TorchBlockKernel, "process_weights_after_loading", skipping)
    with pytest.raises(RefitError, match="loaded"):
        run_refit(ModelWeights(model_of(5), 30), engine.receiver(), LocalTransport(), verify=True)
    assert skipped
    monkeypatch.undo()
    receipt = run_refit(ModelWeights(model_of(0), 31), engine.receiver(), LocalTransport(), verify=True)
    assert all(claim.status != "failed" for claim in receipt.claims)


def test_a_half_loaded_scale_is_named_by_the_registry_and_else_by_log_probs(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader writes the scales of v over those of k. It wrote as many values as it should, and a second load writes
    the same: staging that starts as NaN tells."""
    from vllm.model_executor.parameter import BlockQuantScaleParameter  # pyright: ignore[reportMissingImports]

    run_refit(ModelWeights(model_of(0), 40), engine.receiver(), LocalTransport(), verify=True)
    original = BlockQuantScaleParameter.load_qkv_weight

    def astray(self: Any, loaded_weight: torch.Tensor, **where: Any) -> None:
        if where["shard_id"] == "v":
            where["shard_offset"] -= where["shard_size"]
        original(self, loaded_weight, **where)

    with monkeypatch.context() as patch:
        patch.setattr(BlockQuantScaleParameter, "load_qkv_weight", astray)
        with pytest.raises(RefitError, match=r"fp8_layout: 2 tensors were loaded in part: .*qkv_proj.weight_scale_inv"):
            run_refit(ModelWeights(model_of(5), 41), engine.receiver(), LocalTransport(), verify=False)
        patch.setattr(engine.receiver(), "_derived", registry().without("fp8_layout"))
        run_refit(ModelWeights(model_of(5), 42), engine.receiver(), LocalTransport(), verify=False)
        found = engine.score(list(probes()), "prefill")
        assert not all(np.isfinite(one.logprobs[1:]).all() for one in found.values())
    receipt = run_refit(ModelWeights(model_of(5), 43), engine.receiver(), LocalTransport(), verify=True)
    assert all(claim.status != "failed" for claim in receipt.claims)
    assert np.abs(answers(engine).prefill - reference(5, dequantised=True)).mean() < NEAR, "no NaN stays in the cache"


MOE = """
from lockstep.rollout.vllm_start import EngineUnavailable
from tests.vllm.test_quantised import model_of, start
try:
    print("served as", start(model_of(0, "qwen3_moe", moe_intermediate_size=128)).receiver().quantisation)
except EngineUnavailable as error:
    print("refused:", error)
"""


def test_experts_are_served_or_refused_by_name() -> None:
    """In a process of its own: a MoE needs process groups that an engine without experts does not make. Which of both
    it is depends on the CPU: vLLM's fp8 experts need AMX."""
    ran = subprocess.run([sys.executable, "-c", MOE], capture_output=True, text=True, timeout=300)
    last = ran.stdout.strip().splitlines()[-1]
    assert last == "served as fp8" or re.fullmatch(r"refused: vLLM can't serve fp8 weights here: .*MoE.*", last), ran


DEEP_GEMM = """
import os, sys
import vllm.envs as envs
from vllm.transformers_utils.config import get_config
from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used
before = envs.VLLM_USE_DEEP_GEMM_E8M0
get_config(sys.argv[1], trust_remote_code=False)
once = hasattr(is_deep_gemm_e8m0_used, "cache_clear")
print(before, os.environ.get("VLLM_USE_DEEP_GEMM_E8M0"), envs.VLLM_USE_DEEP_GEMM_E8M0, once)
"""


@pytest.mark.parametrize(("stated", "expected"), [(None, "True 1 True True"), ("0", "False 0 False True")])
def test_a_start_with_power_of_two_scales_leaves_deep_gemm_as_any_start_would(
    stated: str | None, expected: str, tmp_path: Path
) -> None:
    """vLLM writes a variable for the whole process when it reads such a configuration: its own default, and only where
    nobody set it (docs/vllm.md), so that a later engine with float32 scales computes as it would have alone. In a
    process of its own: vLLM keeps what it has read of its environment once an engine stands. Printed: the setting
    before, the variable and the setting after, and whether it is decided once for a process."""
    model = model_of(0)
    section = served_section(as_checkpoint(ModelWeights(model, 0)).manifest(), "fp8_ue8m0")
    folder = write_model_folder(model, tmp_path, quantisation=section)
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_USE_DEEP_GEMM_E8M0"}
    environment |= {} if stated is None else {"VLLM_USE_DEEP_GEMM_E8M0": stated}
    command = [sys.executable, "-c", DEEP_GEMM, str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ran.stdout.strip().splitlines()[-1:] == [expected], ran
