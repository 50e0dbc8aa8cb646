"""How fast weights get into an engine, against a plain copy of the same bytes in the same run.

    python -m benchmarks.refit [--megabytes 600] [--repeats 7] [--threads 1] [--bucket-megabytes 16] [--folder DIR]

JSON on stdout: for the transports ``local`` (engine in this process), ``shm`` and ``disk`` (engine in a process of its
own, disk in DIR, by default a temporary folder), the seconds of the transfer phase, and their rate as a share of
``copy``: ``torch.Tensor.copy_`` of every tensor into memory that has been written before. The four take turns, so that
what slows the machine down slows all of them; shares are of medians. Also by itself: the digest (which the transfers
of shm and disk compute at both ends), the commit, and the verification of a receipt (claims covered and loaded), which
is due at some refits only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

GOALS = {"local": 0.8, "shm": 0.5}
"""Least share of the plain copy's rate."""


def make_model(megabytes: int, seed: int) -> Any:
    """A bfloat16 Llama of about this size: layers of 25 MB and an embedding of 33 MB."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = AutoConfig.for_model(
        "llama", **shape, vocab_size=16_384, num_hidden_layers=max(1, round((megabytes - 33) / 24)),
        tie_word_embeddings=True, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


class Copy:
    """The plain copy: every tensor of a source into its own place."""

    def __init__(self, source: Any) -> None:
        import torch

        self._pairs = [(tensor, torch.zeros_like(tensor)) for _, _, _, tensor in source.shards()]

    def seconds(self) -> float:
        """Of copying all of them once."""
        begin = time.perf_counter()
        for tensor, target in self._pairs:
            target.copy_(tensor)
        return time.perf_counter() - begin


def digest_rate(bucket_bytes: int) -> float:
    """Bytes a second of a bucket's digest, the best of several."""
    import torch

    from benchmarks.machine import best_seconds
    from lockstep.records import Manifest, TensorSpec
    from lockstep.refit.buckets import TRAILER_BYTES, plan_buckets, seal

    (bucket,) = plan_buckets(Manifest(0, (TensorSpec("w", (bucket_bytes,), "uint8", "w"),)), bucket_bytes)
    buffer = torch.randint(0, 256, (bucket.num_bytes + TRAILER_BYTES,), dtype=torch.uint8)
    return bucket_bytes / best_seconds(lambda: seal(bucket, buffer, transfer=1, version=1))


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All transports in turn, ``repeats`` times after one that is not counted."""
    import torch

    from lockstep.config.schema import RefitConfig, RolloutConfig
    from lockstep.model.weights import ModelWeights
    from lockstep.refit.engine_child import start_engine
    from lockstep.refit.transaction import run_refit
    from lockstep.refit.transports import make_transport
    from lockstep.rollout.torch_engine import TorchEngine

    torch.set_num_threads(arguments.threads)
    settings = RefitConfig(bucket_bytes=arguments.bucket_megabytes << 20, folder=str(folder))
    source = ModelWeights(make_model(arguments.megabytes, seed=1), version=1)
    model = make_model(arguments.megabytes, seed=2)
    described = {
        "engine": "torch",
        "threads": arguments.threads,
        "model_config": json.loads(model.config.to_json_string(use_diff=False)),
        "model_dtype": "bfloat16",
        "rollout": RolloutConfig().model_dump(mode="json"),
    }
    plain = Copy(source)
    engines: dict[str, Any] = {"local": TorchEngine(model, RolloutConfig())}
    engines["shm"] = engines["disk"] = start_engine(described, timeout_s=settings.timeout_s)
    transports = {name: make_transport(name, settings) for name in engines}  # pyright: ignore[reportArgumentType]
    seconds: dict[str, list[float]] = {name: [] for name in ("copy", *engines)}
    receipts: dict[str, Any] = {}
    try:
        for repeat in range(arguments.repeats + 1):
            copied = plain.seconds()
            for name, engine in engines.items():
                verify = repeat == arguments.repeats
                receipts[name] = run_refit(source, engine.receiver(), transports[name], verify=verify)
                if repeat:
                    seconds[name].append(receipts[name].transfer_s)
            if repeat:
                seconds["copy"].append(copied)
    finally:
        engines["shm"].close()
    num_bytes = receipts["local"].transferred_bytes
    medians = {name: median(values) for name, values in seconds.items()}
    return {
        "bytes": num_bytes,
        "buckets": receipts["shm"].num_buckets,
        "seconds": seconds,
        "median_s": medians,
        "gb_per_s": {name: num_bytes / value / 1e9 for name, value in medians.items()},
        "share_of_copy": {name: medians["copy"] / medians[name] for name in engines},
        "digest_gb_per_s": digest_rate(settings.bucket_bytes) / 1e9,
        "commit_s": {name: receipt.commit_s for name, receipt in receipts.items()},
        "verify_s": {name: receipt.verify_s for name, receipt in receipts.items()},
    }


def main() -> None:
    """Parse arguments; print one JSON object. Exits 1 if a transport misses its goal."""
    parser = argparse.ArgumentParser(description="Rate of a refit's transfer against a plain copy.")
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bucket-megabytes", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="for disk; None: a temporary folder")
    arguments = parser.parse_args()
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        result = measure(arguments, arguments.folder or Path(temporary))
    shares = result["share_of_copy"]
    about = {"benchmark": "refit", "threads": arguments.threads, "load_average_1min": load_average, "goals": GOALS}
    print(json.dumps(about | result, indent=2))
    missed = {name: shares[name] for name, goal in GOALS.items() if shares[name] < goal}
    if missed:
        sys.exit(f"below the goal: {missed}, goals {GOALS}")


if __name__ == "__main__":
    main()
