"""Save and load: bit-equal or refused, with everything that is wrong named before anything changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.config.schema import TrainerConfig
from lockstep.train.checkpoint import TrainerStateError
from lockstep.train.fsdp import FsdpTrainer
from tests.contract.test_trainer import Reinforce, batch
from tests.contract.tiny_models import tiny_model


def trainer(dtype: str = "bfloat16", model_type: str = "qwen3_moe", **overrides: object) -> FsdpTrainer:
    model = tiny_model(model_type, torch.bfloat16 if dtype == "bfloat16" else torch.float32, **overrides)
    config = TrainerConfig.model_validate(
        {"dtype": dtype, "learning_rate": 1e-2, "schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.1}
    )
    return FsdpTrainer(model, config, total_optimizer_steps=8, temperature=1.0)


def steps(subject: FsdpTrainer, seeds: range) -> list[tuple[float, float | None, float]]:
    found = []
    for seed in seeds:
        loss = subject.forward_backward(batch(seed), Reinforce()).loss
        result = subject.optim_step()
        found.append((loss, result.grad_norm, result.learning_rate))
    return found


def state(subject: FsdpTrainer) -> dict[str, torch.Tensor]:
    live = {f"live/{name}": tensor for name, _, _, tensor in subject.weights().shards()}
    return {name: tensor.clone() for name, tensor in {**subject._state(), **live}.items()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("saved_at", [0, 3])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path, dtype: str, saved_at: int) -> None:
    straight = trainer(dtype)
    steps(straight, range(saved_at))
    straight.save(tmp_path / "checkpoint")
    saved = state(straight)
    expected = steps(straight, range(saved_at, 6))
    resumed = trainer(dtype)
    steps(resumed, range(10, 12))  # whatever it did before is gone after the load
    resumed.load(tmp_path / "checkpoint")
    assert equal(state(resumed), saved)
    assert resumed.version == saved_at
    assert steps(resumed, range(saved_at, 6)) == expected
    assert equal(state(resumed), state(straight))


def test_gradients_pending_at_a_load_are_dropped(tmp_path: Path) -> None:
    subject = trainer()
    subject.save(tmp_path / "checkpoint")
    subject.forward_backward(batch(), Reinforce())
    subject.load(tmp_path / "checkpoint")
    assert subject.optimizer.gradients == {}
    assert subject.forward_backward(batch(), Reinforce()).num_micro_batches > 0


@pytest.mark.parametrize(("saved", "loaded"), [(3, 2), (2, 3)])
def test_a_layer_too_many_or_too_few_is_named_and_nothing_is_loaded(tmp_path: Path, saved: int, loaded: int) -> None:
    trainer(num_hidden_layers=saved).save(tmp_path / "checkpoint")
    subject = trainer(num_hidden_layers=loaded)
    before = state(subject)
    word = "unknown to this trainer" if saved > loaded else "missing in the checkpoint"
    with pytest.raises(TrainerStateError, match=rf"(?s)nothing was loaded.*{word}: exp_avg/model\.layers\.2\."):
        subject.load(tmp_path / "checkpoint")
    assert equal(state(subject), before)


def test_other_shapes_are_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    trainer(moe_intermediate_size=64).save(tmp_path / "checkpoint")
    subject = trainer()
    before = state(subject)
    with pytest.raises(
        TrainerStateError, match=r"down_proj: shape \(8, 64, 64\) in the checkpoint, \(8, 64, 32\) here"
    ):
        subject.load(tmp_path / "checkpoint")
    assert equal(state(subject), before)


def test_other_dtypes_are_named_because_a_conversion_would_be_silent(tmp_path: Path) -> None:
    from lockstep.train.checkpoint import load_tensors, save_tensors

    save_tensors(tmp_path / "checkpoint", {"a": torch.ones(2)})
    target = {"a": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(TrainerStateError, match=r"a: torch\.float32 in the checkpoint, torch\.bfloat16 here"):
        load_tensors(tmp_path / "checkpoint", target)
    assert float(target["a"].sum()) == 0


def test_moments_missing_from_a_checkpoint_are_an_error(tmp_path: Path) -> None:
    from lockstep.train.checkpoint import save_tensors

    subject = trainer()
    partial = {name: tensor for name, tensor in state(subject).items() if not name.startswith(("exp_avg_sq/", "live/"))}
    save_tensors(tmp_path / "checkpoint", partial)
    with pytest.raises(TrainerStateError, match=r"missing in the checkpoint: exp_avg_sq/"):
        subject.load(tmp_path / "checkpoint")


def test_an_incomplete_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(TrainerStateError, match="is not complete"):
        trainer().load(tmp_path)


def test_policy_buffers_and_frozen_weights_are_in_the_checkpoint(tmp_path: Path) -> None:
    subject = trainer("float32", "deepseek_v4")
    assert subject.frozen
    buffers = {name for name in subject._state() if name.startswith("frozen/")}
    assert any(name.endswith("tid2eid") for name in buffers)
    assert any(name.endswith("e_score_correction_bias") for name in buffers)
    subject.save(tmp_path / "checkpoint")
    other = trainer("float32", "deepseek_v4")
    for name, tensor in other._state().items():
        if name.startswith("frozen/"):
            tensor.zero_()
    other.load(tmp_path / "checkpoint")
    assert equal(state(other), state(subject))
