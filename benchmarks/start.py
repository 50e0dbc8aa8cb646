"""How long until ``lockstep --help`` has answered, and whether light imports stay light.

    python -m benchmarks.start [--repeats 7]

JSON on stdout: median and fastest wall seconds and CPU seconds of fresh processes. Exits 1 if ``--help`` takes
``HELP_LIMIT_S`` or longer (median), or if one of ``LIGHT_IMPORTS`` loads torch.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from statistics import median

HELP_LIMIT_S = 0.5
LIGHT_IMPORTS = ("lockstep", "lockstep.config.load", "lockstep.records", "lockstep.cli")
HEAVY_MODULES = ("torch", "transformers")


def time_command(command: list[str], repeats: int) -> dict[str, float]:
    """Median and fastest wall seconds and median CPU seconds of ``command``, each run a process of its own.

    Raises CalledProcessError if it fails.
    """
    wall, cpu = [], []
    for _ in range(repeats):
        before, begin = _children_cpu_s(), time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wall.append(time.perf_counter() - begin)
        cpu.append(_children_cpu_s() - before)
    return {"median_s": median(wall), "min_s": min(wall), "cpu_s": median(cpu)}


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def heavy_modules_of(module: str) -> list[str]:
    """Which of ``HEAVY_MODULES`` are loaded once ``module`` has been imported in a fresh interpreter."""
    code = f"import sys, {module}; print(*(name for name in {HEAVY_MODULES!r} if name in sys.modules))"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()


def main() -> None:
    """Parse arguments; print one JSON object."""
    parser = argparse.ArgumentParser(description="Start-up time of the command line.")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "lockstep --help": [sys.executable, "-m", "lockstep", "--help"],
        **{f"import {module}": [sys.executable, "-c", f"import {module}"] for module in LIGHT_IMPORTS},
        "import torch": [sys.executable, "-c", "import torch"],
    }
    times = {name: time_command(command, arguments.repeats) for name, command in commands.items()}
    heavy = {module: heavy_modules_of(module) for module in LIGHT_IMPORTS}
    result = {
        "benchmark": "start",
        "load_average_1min": os.getloadavg()[0],
        "limit_s": HELP_LIMIT_S,
        "times": times,
        "heavy_modules": heavy,
    }
    print(json.dumps(result, indent=2))
    if times["lockstep --help"]["median_s"] >= HELP_LIMIT_S:
        sys.exit(f"lockstep --help takes {times['lockstep --help']['median_s']:.2f} s, the limit is {HELP_LIMIT_S} s")
    if any(heavy.values()):
        sys.exit(f"light imports load heavy modules: {heavy}")


if __name__ == "__main__":
    main()
