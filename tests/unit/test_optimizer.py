"""Schedule on known values; masters, clipping, accumulation and refusal against plain references."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.schema import TrainerConfig
from lockstep.train.optimizer import MasterOptimizer, learning_rate


def config(**fields: object) -> TrainerConfig:
    return TrainerConfig.model_validate({"learning_rate": 1e-2, "clip_grad_norm": None, **fields})


def test_linear_schedule_on_known_values() -> None:
    settings_ = config(learning_rate=3e-5, schedule="linear", warmup_steps=2, decay_start_step=11, final_ratio=0.1)
    rates = [learning_rate(step, settings_, 22) for step in range(22)]
    assert rates[:3] == pytest.approx([1.5e-5, 3e-5, 3e-5])
    assert rates[11] == pytest.approx(3e-5)
    assert rates[16] == pytest.approx(3e-5 * (1 - 0.9 * 0.5))
    assert rates[21] == pytest.approx(3e-6)


def test_cosine_schedule_on_known_values() -> None:
    settings_ = config(learning_rate=1.0, schedule="cosine", final_ratio=0.0)
    assert learning_rate(0, settings_, 11) == 1.0
    assert learning_rate(5, settings_, 11) == pytest.approx(0.5)
    assert learning_rate(10, settings_, 11) == pytest.approx(0.0, abs=1e-12)
    assert learning_rate(99, settings_, 11) == pytest.approx(0.0, abs=1e-12)


@settings(deadline=None)
@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 10),
    st.integers(0, 30),
    st.floats(0, 1),
    st.integers(1, 40),
)
def test_schedule_rises_then_never_rises_again_and_stays_in_bounds(
    kind: str, warmup: int, start: int, final: float, total: int
) -> None:
    settings_ = config(learning_rate=1.0, schedule=kind, warmup_steps=warmup, decay_start_step=start, final_ratio=final)
    rates = [learning_rate(step, settings_, total) for step in range(total + 5)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    after = rates[warmup:]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.nn.Parameter(torch.randn(4, 3, generator=generator).to(dtype)),
        "norm": torch.nn.Parameter(torch.ones(3, dtype=dtype)),
    }


def backward(optimizer: MasterOptimizer, factor: float = 1.0) -> None:
    with optimizer.accumulating():
        loss = sum((p * torch.arange(1, p.numel() + 1).view_as(p)).sum() for p in optimizer.live.values())
        (factor * loss).backward()  # pyright: ignore


def test_a_step_equals_torch_adamw_with_decay_on_matrices_only() -> None:
    live = parameters()
    reference = {name: torch.nn.Parameter(p.detach().clone()) for name, p in live.items()}
    optimizer = MasterOptimizer(live, config(weight_decay=0.1), 10)
    torch_adamw = torch.optim.AdamW(
        [
            {"params": [reference["matrix"]], "weight_decay": 0.1},
            {"params": [reference["norm"]], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    for _ in range(3):
        backward(optimizer)
        optimizer.step()
        for p in reference.values():
            p.grad = torch.arange(1, p.numel() + 1).view_as(p).float()
        torch_adamw.step()
    for name, p in live.items():
        torch.testing.assert_close(p, reference[name], rtol=1e-6, atol=1e-7)


def test_micro_batch_gradients_are_summed_in_float32() -> None:
    live = {"w": torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))}
    optimizer = MasterOptimizer(live, config(), 10)
    with optimizer.accumulating():
        for value in (256.0, 1.0, 1.0):  # bfloat16 has no 257
            (live["w"] * value).sum().backward()
    assert optimizer.gradients["w"].dtype == torch.float32
    assert float(optimizer.gradients["w"]) == 258.0
    assert live["w"].grad is None


def test_bfloat16_weights_follow_float32_masters_through_steps_too_small_to_see() -> None:
    live = {"w": torch.nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))}
    optimizer = MasterOptimizer(live, config(learning_rate=1e-4), 1000)
    for _ in range(60):
        backward(optimizer)
        optimizer.step()
    assert float(optimizer.masters["w"]) == pytest.approx(1 - 60e-4, rel=1e-5)
    assert float(live["w"]) == float(optimizer.masters["w"].bfloat16()) != 1.0


def test_clipping_is_on_the_global_norm_and_reports_the_norm_before_it() -> None:
    live = parameters()
    optimizer = MasterOptimizer(live, config(clip_grad_norm=1.0, beta1=0.0, beta2=0.0, eps=1.0), 10)
    before = live["norm"].detach().clone()
    backward(optimizer)
    norm = math.sqrt(sum(n * n for n in range(1, 13)) + 1 + 4 + 9)
    assert optimizer.step().grad_norm == pytest.approx(norm, rel=1e-6)
    gradient = torch.tensor([1.0, 2.0, 3.0]) / norm
    torch.testing.assert_close(before - live["norm"].detach(), 1e-2 * gradient / (gradient + 1.0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_gradient_is_refused_by_name_and_changes_nothing(value: float) -> None:
    live = parameters()
    optimizer = MasterOptimizer(live, config(), 10)
    before = {name: p.detach().clone() for name, p in live.items()}
    backward(optimizer)
    optimizer.gradients["matrix"][0, 0] = value
    with pytest.raises(FloatingPointError, match=r"1 of 2 parameters: matrix"):
        optimizer.step()
    assert optimizer.num_steps == 0
    assert all(torch.equal(p, before[name]) for name, p in live.items())


def test_a_step_without_gradients_moves_the_schedule_only() -> None:
    live = parameters()
    optimizer = MasterOptimizer(live, config(weight_decay=0.5), 10)
    before = live["matrix"].detach().clone()
    assert optimizer.step().grad_norm is None
    assert optimizer.num_steps == 1
    assert torch.equal(live["matrix"], before)


def test_masters_coarser_than_the_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="coarser"):
        MasterOptimizer(parameters(), config(dtype="float32", master_dtype="bfloat16"), 10)
