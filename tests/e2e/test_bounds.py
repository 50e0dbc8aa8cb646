"""Each bound of a recipe that is said to be shown here: a healthy run passes, a fault just above the bound fails.

The fault is planted from outside: the engine gets one layer's weights scaled by a factor, with verification off. How
much a factor moves the metric depends on the machine, so it is searched for: the smallest tried that lands between
1.25 and 1.6 times the bound. A learning rate near zero keeps the policy, and with it the metric, where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from lockstep import loop
from lockstep.config.gate_checks import fitting_bounds
from lockstep.config.load import ResolvedConfig
from lockstep.config.schema import BoundConfig
from lockstep.config.section import Quantisation
from lockstep.config.toml_text import format_value
from lockstep.driver import groups
from lockstep.driver.assembly import Parts, assembled
from lockstep.loop import train
from lockstep.metrics.sinks import read_jsonl
from lockstep.parity.measure import measure_step
from lockstep.recipes import load_recipe, recipe_names
from lockstep.refit.transaction import run_refit
from lockstep.rollout.receiver import TorchReceiver
from tests.e2e.conftest import SMALL

pytestmark = pytest.mark.slow

STILL = ("trainer.learning_rate=1e-12", "eval.num_problems=1", "steps=2", "threads=1")
SHORT = {
    "quickstart": (*STILL, "algorithm.num_prompts=2", "trainer.warmup_steps=0", "trainer.decay_start_step=0"),
    "tiny-qwen3-moe": (*SMALL, *STILL),
    "tiny-deepseek-v4": (*STILL, "supervised.steps=2"),
}
"""Two steps of each recipe; few supervised ones, which only make the policy surer."""

Row = dict[str, object]


def shown_here() -> list[tuple[str, BoundConfig]]:
    """(recipe, bound) for each bound that is shown on a CPU, those of quantised engines among them."""
    found = []
    for name in recipe_names():
        config = load_recipe(name).config
        for scheme in get_args(Quantisation):
            rollout = config.rollout.model_copy(update={"quantisation": scheme})
            bounds = fitting_bounds(config.model_copy(update={"rollout": rollout}), "cpu")
            found += [(name, bound) for bound in bounds if bound.shown]
    return found


CASES = [pytest.param(name, bound, id=f"{name} {bound.metric} {bound.quantisation}") for name, bound in shown_here()]


def recipe_with(name: str, *bounds: BoundConfig) -> ResolvedConfig:
    """The recipe, short, with all of its bounds or only the given ones."""
    settings = [*SHORT[name], "device=cpu"]
    if bounds:
        settings.append(f"gate.bounds={format_value([bound.model_dump() for bound in bounds])}")
        settings.append(f"rollout.quantisation={bounds[0].quantisation}")
    return load_recipe(name, settings)


def rows_of(resolved: ResolvedConfig, run_dir: Path) -> tuple[int, list[Row]]:
    """Exit code and the rows of the steps."""
    code = train(resolved, run_dir)
    return code, [row for row in read_jsonl(run_dir / "metrics.jsonl") if "verdict/status" in row]


class ScaledLayer:
    """Layer 1 of the engine's weights is ``1 + strength`` times the trainer's, at every refit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.strength = 0.0
        original = TorchReceiver.receive

        def receive(receiver: TorchReceiver, tensors) -> None:
            scaled = (
                (name, tensor * (1 + self.strength) if ".layers.1." in name and tensor.is_floating_point() else tensor)
                for name, tensor in tensors
            )
            original(receiver, scaled)

        def unverified(*arguments, verify: bool, **_options):
            return run_refit(*arguments, verify=False)

        monkeypatch.setattr(TorchReceiver, "receive", receive)
        monkeypatch.setattr(loop, "run_refit", unverified)

    def measured(self, parts: Parts, metric: str, strength: float) -> float:
        """The metric of a first batch with that strength."""
        self.strength = strength
        run_refit(parts.trainer.weights(), parts.engine.receiver(), parts.transport, verify=False)
        rollouts = parts.sampler.sample(1, 0).rollouts
        sequences = [sequence for rollout in rollouts for sequence in rollout.sequences]
        scored = parts.trainer.logprobs(sequences)
        logprobs = {key: value.logprobs for key, value in scored.items()}
        return measure_step(logprobs, rollouts, parts.trainer.version).metrics[metric]

    def land_above(self, resolved: ResolvedConfig, bound: BoundConfig) -> None:
        """Search the strength, by factors and then by halving, that lands just above the bound."""
        low, high, strength = 0.0, None, bound.bound
        with assembled(resolved.config, lambda _: None, warm_up=True) as parts:
            for _ in range(24):
                share = self.measured(parts, bound.metric, strength) / bound.bound
                if 1.25 <= share <= 1.6:
                    return
                low, high = (strength, high) if share < 1.25 else (low, strength)
                strength = 2 * strength if high is None else (low + high) / 2
        pytest.fail(f"no strength lands just above {bound.bound:g} on {bound.metric}")


@pytest.mark.parametrize("name", sorted({name for name, _ in shown_here()}))
def test_a_healthy_run_passes_every_bound(name: str, tmp_path: Path) -> None:
    code, rows = rows_of(recipe_with(name), tmp_path / "run")
    assert code == 0
    assert [row["verdict/status"] for row in rows] == ["pass"] * 2
    seen = []
    for bound in fitting_bounds(load_recipe(name).config, "cpu"):
        values = [float(row[f"agreement/{bound.metric}"]) for row in rows]  # pyright: ignore[reportArgumentType]
        assert 0 <= max(values) < bound.bound
        seen += values
    assert max(seen) > 0, "two programs round differently somewhere: nothing else would have been compared"


@pytest.mark.parametrize(("name", "bound"), CASES)
def test_a_fault_just_above_the_bound_fails(
    name: str, bound: BoundConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = recipe_with(name, bound)
    ScaledLayer(monkeypatch).land_above(resolved, bound)
    code, rows = rows_of(resolved, tmp_path / "run")
    assert_fails_just_above(code, rows, bound)


def assert_fails_just_above(code: int, rows: Sequence[Row], bound: BoundConfig) -> None:
    """The first step warns, since one breach may be odd; the second one stops the run."""
    values = [float(row[f"agreement/{bound.metric}"]) for row in rows]  # pyright: ignore[reportArgumentType]
    assert all(bound.bound < value < 2 * bound.bound for value in values), values
    assert [row["verdict/status"] for row in rows] == ["warn", "stop"]
    assert code == 1
    assert rows[-1]["agreement/metric"] == bound.metric
    assert f"above the bound {bound.bound:g}" in str(rows[-1]["verdict/sentence"])
    assert bound.evidence in str(rows[-1]["verdict/sentence"])
    assert "not shown" not in str(rows[-1]["verdict/sentence"])


def test_single_tokens_that_are_off_break_the_bound_on_the_mean_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens whose experts differ, as after a router tie: the median does not see them, the mean does."""
    _, healthy = rows_of(recipe_with("tiny-qwen3-moe"), tmp_path / "healthy")
    tokens = min(float(row["agreement/tokens"]) for row in healthy)  # pyright: ignore[reportArgumentType]
    mean, median = fitting_bounds(load_recipe("tiny-qwen3-moe").config, "cpu")
    original, off = groups.sequence_of, np.float32(1.3 * mean.bound * tokens / 4)

    def sequence_of(prompt, completion):
        if completion.request_id.endswith("/0"):  # one sample of each of the four groups
            completion.logprobs[0] += off
        return original(prompt, completion)

    monkeypatch.setattr(groups, "sequence_of", sequence_of)
    code, rows = rows_of(recipe_with("tiny-qwen3-moe"), tmp_path / "run")
    assert_fails_just_above(code, rows, mean)
    assert all(float(row["agreement/abs_diff/p50"]) < median.bound for row in rows)  # pyright: ignore[reportArgumentType]
