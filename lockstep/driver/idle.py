"""Steps that teach nothing: why, how many in a row, and when a run that does nothing else is stopped.

Where every reward abstained, or the rewards of each group are equal, no gradient is made and the optimizer leaves the
weights alone. One such step is said in its line and counted; a run of them is a fault of data, rewards or settings that
would otherwise end as a success.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.config.schema import AlgorithmConfig


class IdleError(RuntimeError):
    """A run that learns nothing is stopped: since when, why, and what would help."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A finished step that moved no weight. ``abstained``: because no sample has a reward; ``why`` is a clause."""

    why: str
    abstained: bool = False


def idleness(metrics: Mapping[str, object], algorithm: AlgorithmConfig) -> Idle | None:
    """Why the step with these metrics moved no weight; None if it did (``optimizer_steps/moved`` is above 0)."""

    def number(name: str) -> float:
        value = metrics.get(name, 0)
        return float(value) if isinstance(value, int | float) else 0.0

    if number("optimizer_steps/moved"):
        return None
    samples = number("num_rollouts")
    if not samples:
        dropped, unscored = number("rollout/dropped_groups"), number("rollout/dropped_unscored_groups")
        if dropped and dropped == unscored:
            why = f"dynamic sampling dropped all {dropped:.0f} groups, because no sample of them has a reward"
            return Idle(why, abstained=True)
        return Idle(f"dynamic sampling dropped all {dropped:.0f} groups ({unscored:.0f} of them without any reward)")
    if number("num_abstained") == samples:
        return Idle(f"every reward abstained on all {samples:.0f} samples", abstained=True)
    if number("num_excluded") == samples:
        kinds = {"without a reward": "num_abstained", "aborted or failed": "num_aborted", "empty": "num_empty"}
        counts = ", ".join(f"{number(name):.0f} {kind}" for kind, name in kinds.items() if number(name))
        return Idle(f"none of the {samples:.0f} samples can be used ({counts})")
    if not number("num_loss_tokens"):
        return Idle(f'all usable samples are truncated, which algorithm.truncated = "{algorithm.truncated}" leaves out')
    if number("corrections/rejected_tokens") >= number("num_loss_tokens"):
        return Idle("the corrections rejected every token")
    if algorithm.advantage == "distill":
        return Idle("the teacher's log-probs are those of the policy")
    mean = metrics.get("reward/mean")
    of_mean = f", {mean:.4g} in the mean" if isinstance(mean, float) else ""
    return Idle(f"every advantage is 0: the rewards of each group's samples are equal{of_mean}")


@dataclass(slots=True)
class IdleCount:
    """Idle steps: ``total`` of the run, and ``in_row`` up to its last finished step; those of them ``abstained``."""

    total: int = 0
    in_row: int = 0
    abstained_in_row: int = 0

    def add(self, idle: Idle | None) -> None:
        """A step is finished."""
        self.total += idle is not None
        self.in_row = 0 if idle is None else self.in_row + 1
        self.abstained_in_row = self.abstained_in_row + 1 if idle is not None and idle.abstained else 0

    def refuse(self, idle: Idle | None, step: int, num_steps: int, algorithm: AlgorithmConfig) -> None:
        """Raises IdleError after ``step`` of ``num_steps`` if it was one idle step too many, or the run's last one and
        no step had a reward."""
        if idle is None:
            return
        only_abstained = step == num_steps and self.abstained_in_row == num_steps
        if self.abstained_in_row >= algorithm.abstain_patience or only_abstained:
            raise IdleError(
                f"step {step}: {idle.why}, the {_ordinal(self.abstained_in_row)} step in a row: nothing is learned. A "
                "reward abstains when it returns None; check that the rows have what the rewards need (the reference "
                "answer, the row's task), or raise algorithm.abstain_patience if so many steps without one are right"
            )
        if self.in_row >= algorithm.idle_patience:
            raise IdleError(
                f"step {step}: {idle.why}; no weight has changed for {self.in_row} steps. Use harder problems if "
                "rewards are near their maximum, easier ones or a supervised warm-up if near their minimum; or raise "
                "algorithm.idle_patience if so many steps without a signal are right"
            )

    def closing(self, num_steps: int) -> str | None:
        """A sentence for the end of a run in which nothing was learned; None if something was."""
        if self.total < num_steps:
            return None
        return f"none of the {num_steps} steps changed a weight: the policy is the one that the run began with"


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
