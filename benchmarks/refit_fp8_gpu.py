"""fp8 refits into vLLM on one GPU: proved with captured graphs, equal to an engine loaded from a quantised checkpoint.

    python -m benchmarks.refit_fp8_gpu [--model dense moe] [--repeats 5]

Needs a GPU and vLLM's CUDA build. The models are those of ``refit_gpu``. For each, in a process of its own: a vLLM that
serves fp8 (128 × 128 blocks, float32 scales) starts from random weights and is refitted twice, with different weights,
by the ``local`` transport, quantised on the way; the receipts' claims; greedy tokens and log-probs against a fresh
engine that loaded the quantised checkpoint; how far fp8 moves the log-probs from the trainer's; seconds by phase.

JSON on stdout. The bound of ``behaves`` has room for the rounding of what the kernels multiply the weights with.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.refit_gpu import (
    MODELS,
    Attempt,
    greedy,
    local_phases,
    make_model,
    proof_probes,
    proved_refits,
    settings_for,
    share_equal,
)

BOUND = 0.1
"""Mean |log π| difference of the probes: 0.1 is slime's for bfloat16, and fp8 rounds the activations too."""


def start(model: Any, folder: Path, *, weights: Any = None) -> Any:
    """The fp8 engine: random weights, or those of a quantised source written into ``folder``."""
    from safetensors.torch import save_file

    from lockstep.model.weights import ModelWeights
    from lockstep.refit.derived_vllm import registry
    from lockstep.refit.names import as_checkpoint
    from lockstep.refit.quantised import quantised
    from lockstep.refit.quantised_config import served_section
    from lockstep.rollout.vllm_engine import VllmEngine
    from lockstep.rollout.vllm_folder import write_model_folder

    manifest = as_checkpoint(ModelWeights(model, 0)).manifest()
    write_model_folder(model, folder, quantisation=served_section(manifest, "fp8"))
    if weights is not None:
        shards = quantised(as_checkpoint(weights), "fp8").shards()
        save_file({name: tensor.cpu().contiguous() for name, _, _, tensor in shards}, folder / "model.safetensors")
    settings = settings_for(folder, load_format="dummy" if weights is None else "safetensors")
    return VllmEngine(replace(settings, quantisation="fp8"), derived=registry(), device="cuda")


def proved(engine: Any, model: Any, sets: dict[str, Any]) -> dict[str, Any]:
    """Refits with every claim checked; ``behaves`` against the module with the dequantised weights."""
    probes = proof_probes(model)
    shown = proved_refits(engine, model, sets, probes, scheme="fp8", bound=BOUND)
    return shown | {"moved_by_fp8": moved_by_fp8(model, probes)}


def moved_by_fp8(model: Any, probes: Any) -> float:
    """Mean |log π| difference between the module with its own weights and with what fp8 makes of them."""
    import numpy as np

    from lockstep.model.weights import ModelWeights
    from lockstep.refit.check import module_scores
    from lockstep.refit.probes import holding
    from lockstep.refit.quantised import served_weights

    plain = module_scores(model, probes.sequences)
    with holding(model, served_weights(ModelWeights(model, 0), "fp8")):
        rounded = module_scores(model, probes.sequences)
    pairs = [(plain[s.sequence_id].logprobs, rounded[s.sequence_id].logprobs) for s in probes.sequences]
    return float(np.concatenate([np.abs(one - other)[1:] for one, other in pairs]).mean())


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Everything about one model."""
    import torch

    from lockstep.model.weights import ModelWeights
    from lockstep.refit.probes import OtherWeights

    attempt = Attempt()
    model = make_model(name)
    own, other = ModelWeights(model, version=2), OtherWeights(ModelWeights(model, version=1))
    attempt.found |= {"model": name, "gpu": torch.cuda.get_device_name()}
    vocabulary = model.config.vocab_size
    with tempfile.TemporaryDirectory() as temporary:
        engine = start(model, Path(temporary) / "empty")
        attempt("proved", lambda: proved(engine, model, {"other weights": other, "the model's": own}))
        refitted = attempt("greedy", lambda: greedy(engine, vocabulary))
        attempt("local", lambda: local_phases(engine, own, repeats))
        engine.close()
        fresh = start(model, Path(temporary) / "full", weights=own)
        loaded = attempt("greedy_from_disk", lambda: greedy(fresh, vocabulary))
        attempt("greedy_equal", lambda: share_equal(refitted, loaded))
        fresh.close()
    return attempt.found


def main() -> None:
    """Parse arguments; each model in a process of its own; one JSON object on stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(measure(options.model[0], options.repeats)))
        return
    report: dict[str, Any] = {"benchmark": "refit_fp8_gpu"}
    for name in options.model:
        command = [sys.executable, "-m", "benchmarks.refit_fp8_gpu", "--alone", "--model", name]
        done = subprocess.run([*command, "--repeats", str(options.repeats)], stdout=subprocess.PIPE, text=True)
        lines = done.stdout.splitlines()
        report[name] = json.loads(lines[-1]) if done.returncode == 0 and lines else {"failed": done.returncode}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
