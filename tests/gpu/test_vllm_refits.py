"""Refits into vLLM on GPUs, by the benchmarks that prove them: claims with captured graphs, expert maps over ranks.

pytest --lane stage-b-1-gpu --hardware h200 tests/gpu/test_vllm_refits.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from lockstep.lanes.recorder import Recorder

CLAIMS = ("covered", "loaded", "derived", "behaves")


def benchmark(name: str, *arguments: str) -> dict[str, Any]:
    """A benchmark in a process of its own: its JSON."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.lane(
    "stage-b-1-gpu",
    hardware={"cuda": ["h100", "h200"], "rocm": ["mi300x", "mi350"]},
    minutes=5,
    labels=["refit", "vllm"],
    owner="refit",
    gates=["refit behaves", "greedy tokens equal to a disk-loaded engine's"],
)
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_two_refits_with_captured_graphs_hold_every_claim(model: str, lane_evidence: Recorder) -> None:
    found = benchmark("refit_gpu", "--model", model, "--repeats", "1")[model]
    receipts = [receipt for receipt in found["proved"].values() if isinstance(receipt, dict)]
    assert len(receipts) == 2, found["proved"]
    for receipt in receipts:
        for name in CLAIMS:
            lane_evidence.claim(f"refit {name}", receipt[name].partition(":")[0])
    assert found["local_copies_directly"], "every refit went through vLLM's own loader"
    equal, _, total = found["greedy_equal"].partition(" of ")
    lane_evidence.gate("greedy tokens equal to a disk-loaded engine's", int(equal), int(total), "at_least")


@pytest.mark.lane(
    "stage-c-2-gpu",
    hardware={"cuda": ["h100", "h200"]},
    minutes=10,
    labels=["refit", "vllm"],
    owner="refit",
    gates=["tokens equal after the maps were refreshed"],
)
def test_expert_maps_over_two_ranks_survive_a_reload(lane_evidence: Recorder) -> None:
    found = benchmark("expert_parallel_gpu", "--gpus", "2")
    equal, tokens = found["equal"], found["tokens"]
    lane_evidence.gate(
        "tokens equal after the maps were refreshed", equal["maps refreshed, reloaded"], tokens, "at_least"
    )
    assert equal["reloaded with zeroed maps"] < tokens, "the fault has to show, or nothing was proved"
