"""Rollouts of several sequences through advantages, trainer and agreement: rollouts count once, and so do tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep.config.schema import AlgorithmConfig
from lockstep.parity.measure import measure_step
from lockstep.records import Batch, Problem, Rollout, Score
from lockstep.train.advantages import prepare
from lockstep.train.objective import PolicyObjective
from lockstep.turns import Turn, join_turns
from tests.contract.test_trainer import TEMPERATURE, assert_close, gradients, trainer
from tests.contract.tiny_models import tiny_model

REWARDS = {"forks": 1.0, "grows": 0.0, "single": 0.25}
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum")


def agent_turns(seed: int, num: int, *, keeps_reasoning: bool) -> list[Turn]:
    rng = np.random.default_rng(seed)
    history, turns = rng.integers(3, 99, 5).tolist(), []
    for _ in range(num):
        thought, answer = rng.integers(3, 99, 4).tolist(), rng.integers(3, 99, 3).tolist()
        tokens = [*thought, *answer]
        turns.append(Turn(list(history), tokens, rng.normal(-4, 0.5, len(tokens)), [0] * len(tokens)))
        history += [*(tokens if keeps_reasoning else answer), *rng.integers(3, 99, 2).tolist()]
    return turns


TURNS = {
    "forks": agent_turns(0, 3, keeps_reasoning=False),
    "grows": agent_turns(1, 2, keeps_reasoning=True),
    "single": agent_turns(2, 1, keeps_reasoning=True),
}


def rollouts() -> list[Rollout]:
    problem = Problem("g", "p", None)
    joined = {name: join_turns(name, turns).sequences for name, turns in TURNS.items()}
    return [Rollout(n, "g", problem, s, "", Score(REWARDS[n]), "finished") for n, s in joined.items()]


def expected_advantages() -> dict[str, float]:
    """GRPO of three rewards: one for each rollout, however many sequences it has."""
    mean, std = np.mean(list(REWARDS.values())), np.std(list(REWARDS.values()), ddof=1)
    return {name: float((reward - mean) / (std + 1e-6)) for name, reward in REWARDS.items()}


def naive(aggregation: str) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """Loss, gradient and log-probs by rollout, from a forward of every turn alone: nothing is joined or shared."""
    model = tiny_model("qwen3").double()
    num_tokens = sum(len(turn.tokens) for turns in TURNS.values() for turn in turns)
    loss, logprobs = torch.zeros((), dtype=torch.float64), {}
    for name, turns in TURNS.items():
        length = sum(len(turn.tokens) for turn in turns)
        share = {"token_mean": 1 / num_tokens, "seq_mean_token_mean": 1 / (length * 3), "seq_mean_token_sum": 1 / 3}
        found = []
        for turn in turns:
            ids = torch.tensor([*turn.prompt_tokens, *turn.tokens])
            table = torch.log_softmax(model(input_ids=ids[None]).logits[0].double() / TEMPERATURE, -1)
            live = table[torch.arange(len(ids) - 1), ids[1:]][len(turn.prompt_tokens) - 1 :]
            loss = loss - share[aggregation] * expected_advantages()[name] * live.sum()
            found.append(live.detach().numpy())
        logprobs[name] = np.concatenate(found)
    loss.backward()
    return loss.detach(), {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}, logprobs


@pytest.mark.parametrize("packing", ["single", "padded", "packed", "shared_prompt"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_of_joined_turns_is_that_of_every_turn_alone(aggregation: str, packing: str) -> None:
    assert [len(rollout.sequences) for rollout in rollouts()] == [3, 1, 1]
    config = AlgorithmConfig(loss="reinforce", aggregation=aggregation, group_size=3)  # pyright: ignore
    subject = trainer(packing=packing)
    output = subject.forward_backward(Batch(prepare(rollouts(), config).items), PolicyObjective(config))
    loss, gradient, logprobs = naive(aggregation)
    assert output.loss == pytest.approx(float(loss), abs=1e-5)
    assert_close(gradients(subject), gradient)
    for rollout in rollouts():
        ours = [output.logprobs[s.sequence_id][s.loss_mask] for s in rollout.sequences]
        np.testing.assert_allclose(np.concatenate(ours), logprobs[rollout.rollout_id], atol=2e-5)


def test_every_sequence_of_a_rollout_has_its_one_advantage() -> None:
    config = AlgorithmConfig(group_size=3)
    items = prepare(rollouts(), config).items
    expected = expected_advantages()
    for item in items:
        values = item.advantages[item.loss_mask]
        np.testing.assert_allclose(values, expected[item.rollout_id], rtol=1e-5)
        assert not item.advantages[~item.loss_mask].any()


def test_agreement_pools_the_sequences_of_a_rollout() -> None:
    batch = rollouts()
    config = AlgorithmConfig(group_size=3)
    output = trainer().forward_backward(Batch(prepare(batch, config).items), PolicyObjective(config))
    agreement = measure_step(output.logprobs, batch, version=0)
    _, _, logprobs = naive("token_mean")
    d = {
        name: np.abs(logprobs[name] - np.concatenate([np.asarray(turn.logprobs, np.float32) for turn in turns]))
        for name, turns in TURNS.items()
    }
    every, by_rollout = np.concatenate(list(d.values())), [values.mean() for values in d.values()]
    assert agreement.num_tokens == len(every) == 42
    assert agreement.metrics["abs_diff/mean"] == pytest.approx(every.mean(), abs=1e-5)
    assert agreement.metrics["abs_diff/rollout_mean"] == pytest.approx(np.mean(by_rollout), abs=1e-5)
    assert agreement.metrics["abs_diff/max"] == pytest.approx(every.max(), abs=2e-5)
