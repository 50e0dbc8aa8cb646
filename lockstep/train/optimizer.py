"""AdamW over float32 masters, and the learning-rate schedule.

torch's AdamW does the arithmetic. What is here is what surrounds it: live weights in bfloat16 with masters in float32,
gradients summed over micro-batches in float32, the norm's check and clip, and a learning rate that is a pure function
of the step, so that a resumed run can't be off by one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lockstep.config.schema import TrainerConfig
from lockstep.model.load import torch_dtype
from lockstep.train.leaf_check import check_leaves

logger = logging.getLogger(__name__)


def learning_rate(step: int, config: TrainerConfig, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0) of ``total_steps``.

    Rises linearly over ``warmup_steps`` and reaches the peak at step ``warmup_steps - 1``; stays there until
    ``decay_start_step``; then falls, linearly or on half a cosine, to ``final_ratio`` of the peak at the last step.
    """
    peak = config.learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    start = max(config.decay_start_step, config.warmup_steps)
    fraction = min(max((step - start) / max(total_steps - 1 - start, 1), 0.0), 1.0)
    if config.schedule == "linear":
        return peak * (1.0 - (1.0 - config.final_ratio) * fraction)
    return peak * (config.final_ratio + (1.0 - config.final_ratio) * 0.5 * (1.0 + math.cos(math.pi * fraction)))


class GradientError(FloatingPointError):
    """The gradient norm is not finite: the step is refused and no weight has changed."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Gradient norm before clipping (None: nothing had a gradient) and the learning rate used."""

    grad_norm: float | None
    learning_rate: float


class MasterOptimizer:
    """AdamW over the master copies of ``parameters`` (live weights by name; only trainable ones).

    A live parameter that already has the master's precision is its own master. Weight decay is decoupled and leaves
    one-dimensional parameters (norms, biases) alone. Norms and clipping see the whole set.
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter], config: TrainerConfig, total_steps: int) -> None:
        if not parameters:
            raise ValueError("the model has no trainable parameter")
        if config.dtype == "float32" and config.master_dtype == "bfloat16":
            raise ValueError("trainer.master_dtype = 'bfloat16' is coarser than trainer.dtype = 'float32'")
        self.config = config
        self.total_steps = total_steps
        self.num_steps = 0
        self.live = parameters
        master_dtype = torch_dtype(config.master_dtype)
        self.masters = {name: _master(parameter, master_dtype) for name, parameter in parameters.items()}
        self.gradients: dict[str, torch.Tensor] = {}
        self._reported = False
        check_leaves(self.masters)
        groups = [
            {"params": [m for m in self.masters.values() if m.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [m for m in self.masters.values() if m.ndim <= 1], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self._create_moments()

    def _create_moments(self) -> None:
        """Adam's state as its first step would create it: a checkpoint then has the same keys at any step."""
        for master in self.masters.values():
            self.adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """While the block runs, each backward's gradients move into float32 sums as soon as they are complete.

        The live parameters' ``.grad`` stays empty. With one backward nothing is added up.
        """
        handles = []
        for name, parameter in self.live.items():

            def collect(live: torch.Tensor, name: str = name) -> None:
                gradient, live.grad = live.grad, None
                if gradient is None:
                    return
                if name in self.gradients:
                    self.gradients[name].add_(gradient)
                else:
                    self.gradients[name] = gradient.float()

            handles.append(parameter.register_post_accumulate_grad_hook(collect))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def drop_gradients(self) -> None:
        """Forget what has been summed."""
        self.gradients = {}

    def step(self) -> StepResult:
        """Clip, step and round the live weights from their masters. Without gradients nothing but the schedule moves.

        Raises GradientError, and changes nothing, if the gradient norm isn't finite.
        """
        rate = learning_rate(self.num_steps, self.config, self.total_steps)
        norm = None
        if self.gradients:
            norm = self._clip()
            self._report_untrained()
            for name, gradient in self.gradients.items():
                self.masters[name].grad = gradient.to(self.masters[name].dtype)
            for group in self.adamw.param_groups:
                group["lr"] = rate
            self.adamw.step()
            self.adamw.zero_grad(set_to_none=True)
            self.refresh_live()
        self.drop_gradients()
        self.num_steps += 1
        return StepResult(norm, rate)

    def _report_untrained(self) -> None:
        """Say once, at the first step with gradients, which trainable parameters had none: a silent fault otherwise."""
        missing = sorted(self.live.keys() - self.gradients.keys())
        if missing and not self._reported:
            logger.warning(
                "%d trainable parameters had no gradient in the first step and are not being trained: %s",
                len(missing),
                ", ".join(missing[:5]) + (" …" if len(missing) > 5 else ""),
            )
        self._reported = True

    def _clip(self) -> float:
        gradients = list(self.gradients.values())
        norm = float(torch.nn.utils.get_total_norm(gradients, foreach=True))
        if not math.isfinite(norm):
            bad = [name for name, gradient in self.gradients.items() if not bool(gradient.isfinite().all())]
            listed = ", ".join(bad[:5]) or "none alone: the sum of squares overflows"
            raise GradientError(
                f"optimizer step {self.num_steps}: gradient norm is {norm}; the step is refused and no weight changed. "
                f"Non-finite gradients in {len(bad)} of {len(gradients)} parameters: {listed}"
            )
        limit = self.config.clip_grad_norm
        if limit is not None and norm > limit:
            torch._foreach_mul_(gradients, limit / (norm + 1e-6))  # pyright: ignore[reportPrivateImportUsage]
        return norm

    @torch.no_grad()
    def refresh_live(self) -> None:
        """Round the live weights from their masters."""
        names = [name for name, live in self.live.items() if self.masters[name] is not live]
        if names:
            lives, masters = [self.live[n].data for n in names], [self.masters[n].data for n in names]
            torch._foreach_copy_(lives, masters)  # pyright: ignore[reportPrivateImportUsage]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Masters and Adam's state by checkpoint key. Writing into them restores the optimizer (not ``num_steps``)."""
        found: dict[str, torch.Tensor] = {}
        for name, master in self.masters.items():
            found[f"master/{name}"] = master.detach()
            for kind in ("exp_avg", "exp_avg_sq", "step"):
                found[f"{kind}/{name}"] = self.adamw.state[master][kind]
        return found


def _master(live: torch.nn.Parameter, dtype: torch.dtype) -> torch.nn.Parameter:
    if live.dtype == dtype or live.dtype == torch.float32:
        return live
    return torch.nn.Parameter(live.detach().to(dtype))
