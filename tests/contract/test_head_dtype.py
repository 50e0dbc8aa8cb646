"""A float32 head is one setting for trainer and engine: less noise on both, equal names and bytes (B18)."""

from __future__ import annotations

import pytest
import torch

from lockstep.config.schema import RandomModel, RolloutConfig, TrainerConfig
from lockstep.model.head import Float32Head, use_float32_head
from lockstep.model.load import load_model
from lockstep.refit.transaction import run_refit
from lockstep.refit.transports import LocalTransport
from lockstep.rollout.torch_engine import TorchEngine
from lockstep.train.fsdp import FsdpTrainer
from tests.contract.engine_models import ARCHITECTURES


def load(head_dtype: str, dtype: torch.dtype = torch.bfloat16, tied: bool = False):
    fields = {**ARCHITECTURES["qwen3"], "initializer_range": 0.15, "tie_word_embeddings": tied}
    source = RandomModel(model_type="qwen3", config=fields, seed=5)
    return load_model(source, dtype, head_dtype=head_dtype)  # pyright: ignore[reportArgumentType]


def head_errors(head_dtype: str, fast_path: str) -> tuple[float, float]:
    """Mean error of the engine's and of the trainer's log-probs against float64, from the same bfloat16 states, after a
    refit."""
    trainer = FsdpTrainer(load(head_dtype), TrainerConfig(), total_optimizer_steps=1, temperature=1.0)
    engine = TorchEngine(load(head_dtype), RolloutConfig(num_slots=8, fast_path=fast_path))  # pyright: ignore[reportArgumentType]
    receipt = run_refit(trainer.weights(), engine.receiver(), LocalTransport(), verify=True)
    assert {claim.name: claim.status for claim in receipt.claims}["loaded"] == "held"
    generator = torch.Generator().manual_seed(1)
    states = (3 * torch.randn(64, 96, generator=generator)).bfloat16()
    tokens = torch.randint(0, 99, (64,), generator=generator)
    rows = torch.arange(64)
    with torch.no_grad():
        exact = (states.double() @ load("model").lm_head.weight.double().T).log_softmax(-1)[rows, tokens]
        served = engine.decoder.logits(states).float().log_softmax(-1)[rows, tokens]
        trained = trainer.forward.head(states, rows, tokens)
    return float((served - exact).abs().mean()), float((trained - exact).abs().mean())


@pytest.mark.parametrize("fast_path", ["auto", "off"])
def test_a_float32_head_rounds_on_neither_side(fast_path: str) -> None:
    assert min(head_errors("model", fast_path)) > 1e-3
    assert max(head_errors("float32", fast_path)) < 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_changes_no_name_no_byte_and_no_tie(tied: bool) -> None:
    plain, wide = load("model", tied=tied), load("float32", tied=tied)
    assert list(plain.state_dict()) == list(wide.state_dict())
    assert all(torch.equal(value, wide.state_dict()[name]) for name, value in plain.state_dict().items())
    assert (wide.lm_head.weight is wide.get_input_embeddings().weight) == tied
    assert wide.lm_head.weight.dtype == torch.bfloat16
    assert wide.lm_head(torch.ones(1, 96, dtype=torch.bfloat16)).dtype == torch.float32


def test_the_gradient_of_a_float32_head_reaches_bfloat16_weights() -> None:
    wide = load("float32", torch.float32)
    plain = load("model", torch.float32)
    states = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    for model in (wide, plain):
        model.lm_head(states).logsumexp(-1).sum().backward()
    torch.testing.assert_close(wide.lm_head.weight.grad, plain.lm_head.weight.grad)
    half = load("float32")
    half.lm_head(states.bfloat16()).logsumexp(-1).sum().backward()
    assert half.lm_head.weight.grad.dtype == torch.bfloat16
    assert half.lm_head.weight.grad.abs().sum() > 0


def test_a_head_that_is_no_plain_linear_layer_is_refused() -> None:
    model = load("model")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(TypeError, match="plain linear layer"):
        use_float32_head(model)
    assert not isinstance(model.lm_head, Float32Head)
