"""What this machine could do at best: matrix rate and memory bandwidth, to be measured in the run that is judged by it.

    python -m benchmarks.machine [--threads 2]

JSON on stdout. Rates are of plain ``torch.nn.functional.linear`` calls at shapes of SmolLM2-135M (hidden 576, MLP 1536,
vocabulary 49 152); the best of several repeats, since noise only ever slows a machine down.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

SHAPES = {
    "train_mlp": (2048, 576, 1536),
    "train_head": (512, 576, 49_152),
    "decode_mlp": (64, 576, 1536),
    "decode_head": (64, 576, 49_152),
}
"""Use: (rows, inputs, outputs) of the product."""

COPY_BYTES = 256 * 2**20
"""Far above any cache."""


def best_seconds(run: Callable[[], object], *, repeats: int = 5, at_least_s: float = 0.02) -> float:
    """Fastest of ``repeats`` timings of ``run``, each over as many calls as take ``at_least_s``."""
    run()
    begin = time.perf_counter()
    run()
    num_calls = max(1, round(at_least_s / max(time.perf_counter() - begin, 1e-9)))
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(num_calls):
            run()
        seconds.append((time.perf_counter() - begin) / num_calls)
    return min(seconds)


def matrix_rate(rows: int, inputs: int, outputs: int, dtype: Any) -> float:
    """FLOP/s of a linear layer without bias in a torch dtype."""
    import torch

    generator = torch.Generator().manual_seed(0)
    states = torch.randn(rows, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    with torch.no_grad():
        return 2.0 * rows * inputs * outputs / best_seconds(lambda: torch.nn.functional.linear(states, weight))


def copy_rate() -> float:
    """Bytes a second of a large copy, reads and writes both counted."""
    import torch

    source = torch.zeros(COPY_BYTES // 4)
    target = torch.empty_like(source)
    return 2.0 * COPY_BYTES / best_seconds(lambda: target.copy_(source))


def measure_machine(threads: int) -> dict[str, Any]:
    """Rates at ``threads`` threads, and the load average under which they were measured."""
    import torch

    torch.set_num_threads(threads)
    load_average = os.getloadavg()[0]
    return {
        "threads": threads,
        "load_average_1min": load_average,
        "matrix_flops": {
            str(dtype).removeprefix("torch."): {use: matrix_rate(*shape, dtype) for use, shape in SHAPES.items()}
            for dtype in (torch.bfloat16, torch.float32)
        },
        "copy_bytes_per_s": copy_rate(),
    }


def main() -> None:
    """Parse arguments; print one JSON object."""
    parser = argparse.ArgumentParser(description="Matrix rate and memory bandwidth of this machine.")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    print(json.dumps({"benchmark": "machine", **measure_machine(arguments.threads)}, indent=2))


if __name__ == "__main__":
    main()
