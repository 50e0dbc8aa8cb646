"""Starts of vLLM against the memory plan, on one GPU: what they take from the card, part by part.

    python -m benchmarks.memory_vllm_gpu --out memory_vllm.json                         # one configuration
    python -m benchmarks.memory_vllm_gpu --only qwen3-0_6b smollm2-135m --out FILE      # several, one after the other

Each configuration starts twice, in processes of their own: with a cache given in bytes, and with a fraction of the
card, of which vLLM takes what its own profiling leaves. Models are random, from their sizes alone.

    weights     storages of the model that vLLM computes with
    cache       storages of its key/value caches
    start       all that the process took from the card (``torch.cuda.mem_get_info``) when the engine stands
    generate    the same at the peak of a generation: what torch held at most, and what is not torch's

``--out`` is written again after every figure, so that a run that is cut off keeps what it had. Configurations of
``HELD_OUT`` are judged: each figure within 10 % of the plan.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.memory_gpu import ALL, GOAL, generate, job_of, make_model, sequences_of
from benchmarks.memory_workloads import HELD_OUT

CACHE_BYTES = 4 << 30
FRACTION = 0.1
MODES = ("bytes", "fraction")


class Report:
    """The JSON of a run, in a file that is whole after every figure. Several processes write it one after another."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """What is there by now."""
        if not self.path.exists():
            return {"benchmark": "memory_vllm_gpu", "goal": GOAL, "starts": {}}
        return json.loads(self.path.read_text("utf-8"))

    def put(self, start: str, /, **figures: Any) -> None:
        """Add figures to one start, and say them."""
        whole = self.read()
        whole["starts"].setdefault(start, {}).update(figures)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.path)
        print(f"{start}: {json.dumps(figures)}", file=sys.stderr, flush=True)


def judged(measured: int, planned: int) -> dict[str, Any]:
    """A figure beside its plan."""
    ratio = planned / measured if measured else float("inf")
    return {"measured": measured, "planned": planned, "ratio": round(ratio, 4), "within": abs(ratio - 1) <= GOAL}


def planned_items(name: str, mode: str, device: str) -> dict[str, int]:
    """The plan of this engine alone while it generates, by item."""
    from lockstep.topology.memory import plan_memory

    job = job_of(name, ALL[name], device)
    engine = replace(
        job.engine,
        engine="vllm",
        cuda_graphs=False,
        kv_cache_bytes=CACHE_BYTES if mode == "bytes" else None,
        memory_fraction=None if mode == "bytes" else FRACTION,
    )
    phase = plan_memory(replace(job, train=None, engine=engine)).phase("generate")
    return {item.name: item.num_bytes for item in phase.items}


def used_before() -> int:
    """Bytes in use on the first card before this process has a context there; 0 where the driver's tool is absent."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]) << 20
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return 0


def used_now(device: str) -> int:
    """Bytes in use on the card; 0 on a CPU."""
    import torch

    if device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def storages(tensors: Any) -> int:
    """Bytes of the distinct storages under some tensors, however they are nested."""
    import torch
    from torch.utils._pytree import tree_leaves

    found = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tree_leaves(tensors)
        if isinstance(t, torch.Tensor)
    }
    return sum(found.values())


def measure(name: str, mode: str, device: str, report: Report) -> None:
    """One start and one generation, each figure written as soon as it is known."""
    import torch

    from lockstep.rollout.vllm_engine import VllmEngine
    from lockstep.rollout.vllm_folder import write_model_folder
    from lockstep.rollout.vllm_hooks import model_runner, served_model
    from lockstep.rollout.vllm_start import VllmSettings

    work, start = ALL[name], f"{name} {mode}"
    items = planned_items(name, mode, device)
    report.put(start, set="held out" if name in HELD_OUT else "fitted", device=device, items=items)
    before = used_before() if device == "cuda" else 0
    model = make_model(work, "meta", 1)
    sequences = sequences_of(work, model.config.vocab_size)
    if device == "cuda":
        torch.cuda.synchronize()
        report.put(start, before=before, context=used_now(device) - before, gpu=torch.cuda.get_device_name())
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        settings = VllmSettings(
            model_folder=str(write_model_folder(model, Path(temporary) / "model")),
            max_model_len=2 * (work.prompt + work.response),
            num_slots=work.num_prompts * work.group_size,
            prefill_tokens=work.micro_batch,
            kv_cache_bytes=CACHE_BYTES if mode == "bytes" else None,
            memory_fraction=None if mode == "bytes" else FRACTION,
            enforce_eager=True,
        )
        served = VllmEngine(settings, device=device)
    runner, module = model_runner(served.llm), served_model(served.llm)
    report.put(start, start_seconds=round(time.perf_counter() - began, 1))
    if device == "cuda":  # on a CPU vLLM packs weights out of torch's sight
        weights = storages([*module.parameters(), *module.buffers()])
        report.put(start, weights=judged(weights, items["weights"]))
    report.put(start, cache=judged(storages(list(runner.kv_caches)), items["key/value cache"]))
    whole = sum(items.values())
    if device == "cuda":
        reserved, used = torch.cuda.memory_reserved(), used_now(device) - before
        report.put(start, start=judged(used, whole), torch_reserved=reserved, not_torch=used - reserved)
        torch.cuda.reset_peak_memory_stats()
        generate(served, work, sequences)
        other = used_now(device) - before - torch.cuda.memory_reserved()
        report.put(start, generate=judged(torch.cuda.max_memory_reserved() + other, whole), not_torch_at_end=other)
    served.close()
    report.put(start, done=True)


def outside(whole: dict[str, Any]) -> dict[str, float]:
    """Judged figures that miss the goal, by start and name."""
    return {
        f"{start}: {figure}": entry["ratio"]
        for start, figures in whole["starts"].items()
        if figures.get("set") == "held out"
        for figure, entry in figures.items()
        if isinstance(entry, dict) and entry.get("within") is False
    }


def main() -> None:
    """Parse arguments; every start in its own process; exit 1 if one did not end or a judged figure is outside."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ALL), default=["qwen3-0_6b"], metavar="NAME")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a cache in bytes only")
    parser.add_argument("--out", type=Path, default=Path("memory_vllm.json"), help="written after every figure")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    report = Report(options.out)
    if options.alone:
        measure(options.only[0], options.modes[0], options.device, report)
        return
    options.out.unlink(missing_ok=True)
    for name in options.only:
        for mode in options.modes:
            own = ["--alone", "--only", name, "--modes", mode, "--device", options.device, "--out", str(options.out)]
            done = subprocess.run([sys.executable, "-m", "benchmarks.memory_vllm_gpu", *own])
            if done.returncode:
                report.put(f"{name} {mode}", failed=done.returncode)
    whole = report.read()
    print(json.dumps({"outside": outside(whole), **whole}, indent=1))
    starts = whole["starts"].values()
    sys.exit(1 if outside(whole) or not starts or any(not figures.get("done") for figures in starts) else 0)


if __name__ == "__main__":
    main()
