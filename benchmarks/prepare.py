"""Preparing a checkpoint against a plain copy of the same bytes: fp8 quantisation, dequantisation, and shards.

    python -m benchmarks.prepare [--gigabytes 1] [--repeats 3] [--workers 2] [--folder DIR]

JSON on stdout. A bfloat16 Llama is written once; then copy (``shutil.copyfile`` and ``fsync`` of each file, so many
threads as workers), quantisation and shards alternate, each into a folder of its own that is removed again. Rates are
of source bytes. What is written is forced to the disk and read back for its digest in each, but for the copy's digest,
which it has not. The goal is a third of the copy's rate.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HIDDEN, INNER, VOCABULARY = 4096, 11_008, 4096
LAYER_BYTES = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)


def write_source(folder: Path, num_bytes: int) -> int:
    """A Llama of about so many bytes in files of 8 layers' parts. Returns its size."""
    import torch
    from safetensors.torch import save_file

    num_layers = max(1, round(num_bytes / LAYER_BYTES))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    weight_map: dict[str, str] = {}

    def save(file: str, tensors: dict[str, Any]) -> None:
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))

    save("model-ends.safetensors", {
        "model.embed_tokens.weight": weight(VOCABULARY, HIDDEN), "model.norm.weight": weight(HIDDEN)
    })  # fmt: skip
    for layer in range(num_layers):
        at = f"model.layers.{layer}."
        tensors = {f"{at}self_attn.{p}_proj.weight": weight(HIDDEN, HIDDEN) for p in "qkvo"}
        tensors |= {f"{at}mlp.{p}_proj.weight": weight(INNER, HIDDEN) for p in ("gate", "up")}
        tensors |= {f"{at}mlp.down_proj.weight": weight(HIDDEN, INNER)}
        tensors |= {f"{at}{p}_layernorm.weight": weight(HIDDEN) for p in ("input", "post_attention")}
        save(f"model-{layer:05d}.safetensors", tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def copy(source: Path, target: Path, workers: int) -> None:
    """Every weight file, forced to the disk."""
    target.mkdir()

    def one(path: Path) -> None:
        shutil.copyfile(path, target / path.name)
        descriptor = os.open(target / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, source.glob("*.safetensors")))


def prepare(source: Path, target: Path, workers: int, **settings: Any) -> str:
    """One preparation; the folder of the engine."""
    from lockstep.checkpoint.prepare import Preparation
    from lockstep.checkpoint.progress import Silent
    from lockstep.config.prepare_schema import PrepareConfig

    config = PrepareConfig(file_bytes=256 << 20, **settings)
    return Preparation(config, str(source), target, Silent(), workers=workers).run().engine


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor time of a call: the latter says what two free cores would do where others use them too."""
    begin, before = time.perf_counter(), os.times()
    work()
    wall, after = time.perf_counter() - begin, os.times()
    return wall, after.user + after.system - before.user - before.system


def measure(folder: Path, num_bytes: int, repeats: int, workers: int) -> dict[str, Any]:
    """Medians and their ratios to the copy's rate, of runs that alternate."""
    source = folder / "source"
    size = write_source(source, num_bytes)
    quantised = Path(prepare(source, folder / "fp8", workers, quantisation="fp8"))
    quantised_size = sum(path.stat().st_size for path in quantised.glob("*.safetensors"))
    target = folder / "target"
    jobs: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (size, lambda: copy(source, target, workers)),
        "quantise fp8": (size, lambda: prepare(source, target, workers, quantisation="fp8")),
        "quantise fp8_ue8m0": (size, lambda: prepare(source, target, workers, quantisation="fp8_ue8m0")),
        "dequantise fp8": (quantised_size, lambda: prepare(quantised, target, workers)),
        "shards for 4 ranks": (size, lambda: prepare(source, target, workers, shard_ranks=4)),
        "gather": (size, lambda: gathered(folder / "shards", source, target, workers)),
    }
    prepare(source, folder / "shards", workers, shard_ranks=4)
    found: dict[str, list[float]] = {name: [] for name in jobs}
    processor: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, (_, work) in jobs.items():
            wall, used = seconds(work)
            found[name].append(wall)
            processor[name].append(used)
            shutil.rmtree(target)
            os.sync()
    used = {name: statistics.median(values) for name, values in processor.items()}
    rates = {name: jobs[name][0] / statistics.median(values) / 1e9 for name, values in found.items()}
    return {
        "source_bytes": size,
        "workers": workers,
        "load_average_1min": os.getloadavg()[0],
        "seconds": {name: [round(value, 3) for value in values] for name, values in found.items()},
        "cpu_seconds": {name: round(value, 3) for name, value in used.items()},
        "gigabytes_per_s": rates,
        "of_copy": {name: rate / rates["copy"] for name, rate in rates.items()},
        # Source bytes a processor second, of the copy's.
        "of_copy_by_cpu": {name: jobs[name][0] / size * used["copy"] / value for name, value in used.items()},
    }


def gathered(shards: Path, source: Path, target: Path, workers: int) -> None:
    """Shards back to a folder."""
    from lockstep.checkpoint.gather import gather_shards
    from lockstep.checkpoint.progress import Silent

    config = json.loads((source / "config.json").read_text())
    gather_shards(shards / "shards", config, target, file_bytes=256 << 20, workers=workers, progress=Silent())


def main() -> None:
    """Parse arguments; print one JSON object."""
    parser = argparse.ArgumentParser(description="Preparing a checkpoint against a plain copy of the same bytes.")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None, help="Where to write; default: a temporary folder.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        result = measure(Path(folder), int(arguments.gigabytes * 1e9), arguments.repeats, arguments.workers)
    print(json.dumps({"benchmark": "prepare", **result}, indent=2))


if __name__ == "__main__":
    main()
