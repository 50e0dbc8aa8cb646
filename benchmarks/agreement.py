"""What measuring agreement costs: from the training forward, against an extra pass of the trainer over the same tokens.

    python -m benchmarks.agreement [--recipe quickstart] [--steps 4]

Runs the recipe's own steps (sampling, training, verdict, optimizer, refit, recording; no evaluation) and times in each,
in wall and in CPU seconds of the process (which other programs on the machine disturb less):

- ``measure``: everything that the verdict needs beyond training: collecting both sides, all metrics and buckets, the
  gate, and the worst tokens as text;
- ``extra_pass``: one forward without gradients over the step's sequences, which a trainer needs that does not keep the
  log-probs of its training forward. It runs after the step and is not part of it.

JSON on stdout: medians over the steps, shares of the step and of its forward-backward, and seconds of ``measure`` alone
by number of tokens. The first step, which warms up, is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

NUM_TOKENS = (10_000, 100_000, 1_000_000)


class Clock:
    """Wall and CPU seconds of calls by name, over the calls since the last ``take``."""

    def __init__(self) -> None:
        self.wall_s: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}

    def call(self, name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """What ``function`` returns; its seconds are added to ``name``."""
        wall, cpu = time.perf_counter(), time.process_time()
        result = function(*arguments, **named)
        self.wall_s[name] = self.wall_s.get(name, 0.0) + time.perf_counter() - wall
        self.cpu_s[name] = self.cpu_s.get(name, 0.0) + time.process_time() - cpu
        return result

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with its calls timed."""
        return lambda *arguments, **named: self.call(name, function, *arguments, **named)

    def take(self) -> dict[str, dict[str, float]]:
        """The seconds so far, which start again at 0."""
        taken = {"wall_s": self.wall_s, "cpu_s": self.cpu_s}
        self.wall_s, self.cpu_s = {}, {}
        return taken


def run(recipe: str, num_steps: int) -> list[dict[str, dict[str, float]]]:
    """Seconds of each step's parts. Raises RuntimeError if the gate stops a step."""
    from lockstep import loop
    from lockstep.driver.assembly import assembled
    from lockstep.driver.interrupt import StopRequest
    from lockstep.metrics.run_folder import RunFolder
    from lockstep.recipes import load_recipe

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    config = load_recipe(recipe).config
    clock, rows, cursor = Clock(), [], 0
    original, stop = loop.judge, StopRequest(say)
    with (
        tempfile.TemporaryDirectory() as scratch,
        RunFolder(Path(scratch) / "run") as folder,
        assembled(config, say, warm_up=True) as parts,
    ):
        loop.judge = clock.timed("measure", original)
        parts.trainer.forward_backward = clock.timed("forward_backward", parts.trainer.forward_backward)
        try:
            loop.refit(parts, folder, 0)
            for step in range(1, num_steps + 1):
                clock.take()
                sequences, cursor = clock.call("step", one_step, parts, folder, step, cursor, stop)
                clock.call("extra_pass", parts.trainer.logprobs, sequences)
                rows.append(clock.take())
                say(f"step {step}: {rows[-1]['cpu_s']}")
        finally:
            loop.judge = original
    return rows


def one_step(parts: Any, folder: Any, step: int, cursor: int, stop: Any) -> tuple[list[Any], int]:
    """A step of the loop without evaluation and checkpoint: (its sequences, the next cursor)."""
    from lockstep import loop

    sampled = parts.sampler.sample(step, cursor)
    trained = loop.train_on(parts, sampled, step, stop)
    if trained.verdict is not None and trained.stopped:
        raise RuntimeError(f"the gate stopped step {step}: {trained.verdict.sentence}")
    folder.write_rollouts(step, sampled.rollouts, trained.logprobs)
    loop.refit(parts, folder, step)
    stop.release()
    return [sequence for rollout in sampled.rollouts for sequence in rollout.sequences], sampled.cursor


def summary(rows: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians over all steps but the first, and the shares."""
    found: dict[str, Any] = {}
    for kind in ("wall_s", "cpu_s"):
        seconds = {name: median(row[kind][name] for row in rows[1:]) for name in rows[0][kind]}
        found[kind] = seconds
        found[f"share_{kind.removesuffix('_s')}"] = {
            "measure_of_step": seconds["measure"] / seconds["step"],
            "extra_pass_of_step": seconds["extra_pass"] / seconds["step"],
            "extra_pass_of_forward_backward": seconds["extra_pass"] / seconds["forward_backward"],
        }
    return found


def alone(num_tokens: int) -> float:
    """CPU seconds of one ``measure`` over sequences of 1,000 tokens, least of three."""
    from lockstep.agreement import measure

    rng = np.random.default_rng(0)
    rollout = -rng.exponential(1.0, (num_tokens // 1000, 1000)).astype(np.float32)
    train = rollout + 0.01 * rng.standard_normal(rollout.shape).astype(np.float32)
    mask = np.ones(rollout.shape, dtype=bool)
    versions = np.zeros(rollout.shape, dtype=np.int32)
    times = []
    for _ in range(3):
        begin = time.process_time()
        measure(train, rollout, mask, versions=versions, kv_versions=versions, version=0)
        times.append(time.process_time() - begin)
    return min(times)


def main() -> None:
    """Run and print the JSON."""
    parser = argparse.ArgumentParser(description="Cost of measuring agreement, against an extra pass.")
    parser.add_argument("--recipe", default="quickstart", help="A recipe's name or a TOML file.")
    parser.add_argument("--steps", type=int, default=4, help="Steps to run; the first only warms up.")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: at least 2, since the first is left out")
    rows = run(options.recipe, options.steps)
    by_tokens = {f"{num_tokens}": alone(num_tokens) for num_tokens in NUM_TOKENS}
    result = {"recipe": options.recipe, "steps": options.steps, **summary(rows), "measure_alone_cpu_s": by_tokens}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
