"""What a recipe learns, for three seeds fixed beforehand, one run after another.

    python -m benchmarks.quickstart_seeds [--recipe quickstart] [--seeds 0 1 2] [--keep DIR]

JSON on stdout, read from each run's ``metrics.jsonl``: held-out accuracy and form before and after (apart), sampled
reward of the first and last ten steps, the largest agreement numbers of any step, wall seconds and peak memory of the
whole command. Exits 1 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

SEEDS = (0, 1, 2)
NUM_REWARD_STEPS = 10
PEAK_OF = ("agreement/abs_diff/mean", "agreement/abs_diff/p99", "agreement/abs_diff/max", "agreement/k3")
HELDOUT = {"correct": "eval/accuracy", "form": "eval/format", "truncated": "eval/truncated"}

Row = dict[str, Any]


def run_seed(recipe: str, seed: int, run_dir: Path, overrides: list[str]) -> dict[str, Any]:
    """Train one seed in a process of its own and read what it recorded. Raises RuntimeError with the run's own words
    if it did not exit with 0."""
    command = [sys.executable, "-m", "lockstep", "train", recipe, "--run-dir", str(run_dir), "--set", f"seed={seed}"]
    for override in overrides:
        command += ["--set", override]
    load_average, begin = os.getloadavg()[0], time.perf_counter()
    # wait4 gives the peak memory of this child alone; getrusage would give that of the largest so far.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            output.seek(0)
            raise RuntimeError(f"seed {seed} ended with exit code {process.returncode}:\n{output.read()[-3000:]}")
    seconds = time.perf_counter() - begin
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "seed": seed,
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "load_average_1min_before": load_average,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        **outcome(rows),
    }


def outcome(rows: list[Row]) -> dict[str, Any]:
    """What a run's metrics say it learned. Raises ValueError if it was not evaluated before and after."""
    evaluations = [row for row in rows if HELDOUT["correct"] in row]
    if len(evaluations) < 2:
        raise ValueError(f"{len(evaluations)} held-out evaluations in the metrics, at least 2 are needed")
    steps = [row for row in rows if row["step"] > 0]
    rewards = [row["reward/mean"] for row in steps if "reward/mean" in row]
    first, last = mean(rewards[:NUM_REWARD_STEPS]), mean(rewards[-NUM_REWARD_STEPS:])
    return {
        "num_steps": len(steps),
        "heldout_before": {name: evaluations[0].get(key) for name, key in HELDOUT.items()},
        "heldout_after": {name: evaluations[-1].get(key) for name, key in HELDOUT.items()},
        "reward_first_steps": first,
        "reward_last_steps": last,
        "reward_ratio": last / first if first > 0 else None,
        "agreement_peak": {key: max(row[key] for row in steps if key in row) for key in PEAK_OF},
        "verdicts": {s: sum(row["verdict/status"] == s for row in steps) for s in ("pass", "warn", "stop", "unjudged")},
        "step_s_mean": mean(row["time/step_s"] for row in steps),
    }


def main() -> None:
    """Parse arguments; print one JSON object."""
    parser = argparse.ArgumentParser(description="What a recipe learns, for fixed seeds.")
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--keep", type=Path, help="Keep the run folders here (default: they are removed).")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        parent = arguments.keep or Path(directory)
        runs = []
        for seed in arguments.seeds:
            runs.append(
                run_seed(arguments.recipe, seed, parent / f"{arguments.recipe}-seed-{seed}", arguments.overrides)
            )
            print(f"{arguments.recipe}, seed {seed}: {runs[-1]['seconds']:.0f} s", file=sys.stderr)
    result = {"benchmark": "quickstart_seeds", "recipe": arguments.recipe, "overrides": arguments.overrides}
    print(json.dumps({**result, "runs": runs}, indent=2))


if __name__ == "__main__":
    main()
