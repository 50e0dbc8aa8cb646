"""Lockstep against TRL's GRPOTrainer on a CPU: the same model, prompts, group size, lengths, dtype and update.

    python -m benchmarks.end_to_end [--steps 12] [--block 2] [--lengths uniform ragged] [--trl-python PATH]

Needs the extra ``bench`` (trl 1.16), in this environment or, with ``--trl-python``, in one of its own. Both programs
live in processes of their own and take turns in blocks of steps. JSON on stdout: for each workload the seconds per step
of both (median, first step apart), generated tokens per second, peak memory, the ratio TRL ÷ Lockstep, the rewards of
the first and last three steps, and the time that the bare matrix products would take at the rate measured here.
Exits 1 if a side's reward did not rise or the sides did not do the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.machine import measure_machine
from benchmarks.stepwise import BenchmarkError, Side
from benchmarks.workload import Workload

NUM_WARM_UP_STEPS = 1
NUM_LEARNING_STEPS = 3
LAYER_PARAMETERS, HEAD_PARAMETERS = 106_168_320, 28_311_552
"""Weights of SmolLM2-135M's linear layers, and of its head (49 152 × 576, tied to the embedding)."""

Row = dict[str, Any]


def run_workload(work: Workload, block: int, trl_python: str, trl_settings: str) -> dict[str, Any]:
    """Both sides in turn, blocks of ``block`` steps, for ``work.num_steps`` steps each."""
    arguments = ["--lengths", work.lengths, "--steps", str(work.num_steps), "--threads", str(work.threads)]
    commands = {
        "lockstep": [sys.executable, "-m", "benchmarks.lockstep_side", *arguments],
        "trl": [trl_python, "-m", "benchmarks.trl_side", *arguments, "--settings", trl_settings],
    }
    rows: dict[str, list[Row]] = {name: [] for name in commands}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = {}
        for name, command in commands.items():
            sides[name] = stack.enter_context(Side(name, command, logs / f"{name}.log", work.threads))
            ready = sides[name].read()
            print(f"{work.lengths}: {name} is ready", file=sys.stderr)
            rows[name].append(ready)
        settings = {name: found.pop()["settings"] for name, found in rows.items()}
        for begin in range(0, work.num_steps, block):
            for name, side in sides.items():
                for step in range(begin, min(begin + block, work.num_steps)):
                    row = side.step()
                    rows[name].append(row)
                    report = f"{row['seconds']:.2f} s, reward {mean_reward(row):.3f}, load {os.getloadavg()[0]:.1f}"
                    print(f"{work.lengths}: step {step + 1}/{work.num_steps} {name}: {report}", file=sys.stderr)
    check_same_work(work, rows["lockstep"], rows["trl"])
    sides_found = {name: summary(found, settings[name]) for name, found in rows.items()}
    return {"lengths": work.lengths, **sides_found, "ratio": ratios(sides_found), "rows": rows}


def mean_reward(row: Row) -> float:
    """Mean over a step's completions that have a reward."""
    return mean(reward for reward in row["rewards"] if reward is not None)


def check_same_work(work: Workload, ours: list[Row], theirs: list[Row]) -> None:
    """Raises BenchmarkError unless every step had the same prompts, as many completions, and one more update."""
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        facts = {
            "prompts": (a["problem_ids"], b["problem_ids"]),
            "prompt tokens": (a["prompt_tokens"], b["prompt_tokens"]),
            "completions": (len(a["completion_tokens"]), len(b["completion_tokens"])),
            "updates": (a["num_updates"], b["num_updates"]),
        }
        if work.lengths == "uniform":
            facts["completion tokens"] = (a["completion_tokens"], b["completion_tokens"])
        for name, (one, other) in facts.items():
            if one != other:
                raise BenchmarkError(f"step {step}: {name} differ: Lockstep {one}, TRL {other}")
        expected = {"completions": work.num_completions, "updates": step}
        found = {name: facts[name][0] for name in expected}
        if found != expected:
            raise BenchmarkError(f"step {step}: expected {expected}, both did {found}")


def summary(rows: list[Row], settings: dict[str, Any]) -> dict[str, Any]:
    """A side's figures; medians leave the first step out, whose kernels are still being prepared."""
    timed = rows[NUM_WARM_UP_STEPS:]
    tokens = [sum(row["completion_tokens"]) for row in timed]
    first, last = rows[:NUM_LEARNING_STEPS], rows[-NUM_LEARNING_STEPS:]
    result = {
        "step_s": median(row["seconds"] for row in timed),
        "step_s_min": min(row["seconds"] for row in timed),
        "step_cpu_s": median(row["cpu_seconds"] for row in timed),
        "generate_s": median(row["generate_s"] for row in timed),
        "completion_tokens_per_step": mean(tokens),
        "trained_tokens_per_s": median(n / row["seconds"] for n, row in zip(tokens, timed, strict=True)),
        "generated_tokens_per_s": median(n / row["generate_s"] for n, row in zip(tokens, timed, strict=True)),
        "peak_rss_bytes": max(row["peak_rss_bytes"] for row in rows),
        "reward_first": mean(mean_reward(row) for row in first),
        "reward_last": mean(mean_reward(row) for row in last),
        "settings": settings,
    }
    if "phases_s" in timed[0]:
        names = sorted({name for row in timed for name in row["phases_s"]})
        result["phases_s"] = {name: median(row["phases_s"].get(name, 0.0) for row in timed) for name in names}
    return result


def ratios(sides: dict[str, dict[str, Any]]) -> dict[str, float]:
    """TRL ÷ Lockstep; above 1 is in Lockstep's favour. ``step_per_token`` allows for unequal ragged lengths."""
    ours, theirs = sides["lockstep"], sides["trl"]
    result = {key: theirs[key] / ours[key] for key in ("step_s", "step_s_min", "step_cpu_s", "peak_rss_bytes")}
    result["step_per_token"] = ours["trained_tokens_per_s"] / theirs["trained_tokens_per_s"]
    result["generate_per_token"] = ours["generated_tokens_per_s"] / theirs["generated_tokens_per_s"]
    return result


def bare_products(work: Workload, rows: list[Row], machine: dict[str, Any]) -> dict[str, float]:
    """Seconds that Lockstep's matrix products alone would take a step at the plain bfloat16 rates measured here.

    A shared prompt is computed once a group; head rows only where a token is sampled; backward is twice forward.
    Generation at the rates of 64 rows, training at those of 2048. Attention and everything elementwise is left out.
    ``train_s`` takes every completion backward, while Lockstep takes those without an advantage forward only.
    """
    rates = machine["matrix_flops"]["bfloat16"]
    sampled = mean(sum(row["completion_tokens"]) for row in rows)
    prompts = mean(sum(row["prompt_tokens"]) / work.group_size for row in rows)

    def seconds(layer_rows: float, head_rows: float, use: str) -> float:
        layers = 2.0 * LAYER_PARAMETERS * layer_rows / rates[f"{use}_mlp"]
        return layers + 2.0 * HEAD_PARAMETERS * head_rows / rates[f"{use}_head"]

    return {
        "generate_s": seconds(sampled, sampled, "decode") + seconds(prompts, 0, "train"),
        "train_s": 3.0 * seconds(prompts + sampled, sampled, "train"),
    }


def main() -> None:
    """Parse arguments; print one JSON object."""
    parser = argparse.ArgumentParser(description="End to end against TRL's GRPOTrainer.")
    parser.add_argument("--steps", type=int, default=12, help="Steps of each side; the first is not timed.")
    parser.add_argument("--block", type=int, default=2, help="Steps of one side before the other's turn.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", nargs="+", choices=("uniform", "ragged"), default=["uniform", "ragged"])
    parser.add_argument("--trl-python", default=sys.executable, help="An interpreter whose environment has trl.")
    parser.add_argument("--trl-settings", default="{}", help="Fields of trl_side.TrlSettings as JSON.")
    arguments = parser.parse_args()
    if arguments.steps < 2 * NUM_LEARNING_STEPS:
        parser.error(f"--steps must be at least {2 * NUM_LEARNING_STEPS}, so that first and last steps differ")
    machine = measure_machine(arguments.threads)
    results = []
    for lengths in arguments.lengths:
        work = Workload(lengths, arguments.steps, arguments.threads)
        result = run_workload(work, arguments.block, arguments.trl_python, arguments.trl_settings)
        rows = result.pop("rows")
        result["bare_products"] = bare_products(work, rows["lockstep"][NUM_WARM_UP_STEPS:], machine)
        results.append(result)
    print(json.dumps({"benchmark": "end_to_end", "machine": machine, "results": results}, indent=2))
    idle = [
        f"{result['lengths']}: {name}"
        for result in results
        for name in ("lockstep", "trl")
        if result[name]["reward_last"] <= result[name]["reward_first"]
    ]
    if idle:
        sys.exit(f"the reward did not rise: {', '.join(idle)}")


if __name__ == "__main__":
    main()
