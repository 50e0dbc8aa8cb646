"""The work of the end-to-end comparison: model, prompts, sampling, reward and update, the same for both sides.

SmolLM2-135M-Instruct on generated addition as in the ``quickstart`` recipe, with a constant learning rate so that the
schedule of the two programs can't differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.config.load import ResolvedConfig
from lockstep.recipes import load_recipe

Lengths = Literal["uniform", "ragged"]
"""uniform: stop tokens are sampled like any other and end nothing, every completion has the full length; ragged: a
completion ends at its stop token."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What each step does: ``num_prompts`` groups of ``group_size`` completions, one optimizer step."""

    lengths: Lengths
    num_steps: int
    threads: int = 2
    num_prompts: int = 8
    group_size: int = 8
    max_new_tokens: int = 16
    learning_rate: float = 3e-5

    @property
    def num_completions(self) -> int:
        """Completions of a step."""
        return self.num_prompts * self.group_size

    def resolved(self) -> ResolvedConfig:
        """The quickstart recipe with this workload's settings; nothing is evaluated or saved within its steps."""
        settings = {
            "steps": self.num_steps + 1,  # evaluation and checkpoint belong to the last step, which is never run
            "threads": self.threads,
            "device": "cpu",
            "algorithm.num_prompts": self.num_prompts,
            "algorithm.group_size": self.group_size,
            "rollout.max_new_tokens": self.max_new_tokens,
            "rollout.num_slots": self.num_completions,
            "trainer.learning_rate": self.learning_rate,
            "trainer.schedule": "constant",
            "trainer.warmup_steps": 0,
            "trainer.decay_start_step": 0,
            "checkpoint.every": self.num_steps + 1,
        }
        return load_recipe("quickstart", [f"{key}={value}" for key, value in settings.items()])
