"""Refit into vLLM on one GPU: proved with captured graphs, then timed by phase against the card's copy bandwidth.

    python -m benchmarks.refit_gpu [--model dense moe] [--repeats 7] [--out DIR]

Needs a GPU and vLLM's CUDA build. Models are random, of real sizes: *dense* is Qwen3-0.6B's shape, *moe* a Qwen3-MoE of
about 3.6 GB, both in bfloat16. For each, in a process of its own:

1. a vLLM with CUDA graphs starts from random weights and is refitted twice, with different weights, over ``local`` (the
   trainer's tensors lie on the same GPU); the receipts' claims, ``behaves`` by prefill and by decode among them;
2. greedy tokens of that engine against those of a fresh engine that loaded the same weights from disk;
3. the public silent fault: the same weights pushed under transformers' names into vLLM's own reload, what it says, how
   far the engine then is from the trainer; and what the manifest's check answers to the same names;
4. seconds of each phase over refits with changed weights: the ``local`` transport, ``cuda_ipc`` into an engine in a
   process of its own, and the engine's own per-tensor ``load_weights``, against a plain copy of the same bytes.

JSON on stdout. Rates count bytes read and bytes written, as the copy bandwidth does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

GOAL_SHARE_OF_COPY = 0.5
GOAL_PAUSE_S = 0.1
BOUND = 0.1
"""Mean |log π| difference of bfloat16: slime's bound; 0.007 to 0.01 were seen between vLLM and transformers."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": (
        "qwen3",
        {
            "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
            "max_position_embeddings": 2048,
        },
    ),
    "moe": (
        "qwen3_moe",
        {
            "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 6,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 64,
            "num_experts_per_tok": 8, "vocab_size": 32_768, "max_position_embeddings": 2048,
            "norm_topk_prob": True,
        },
    ),
}  # fmt: skip


# --- parts ------------------------------------------------------------------------------------------------------------


def make_model(name: str) -> Any:
    """The random model on the GPU, in bfloat16; its outputs depend visibly on every layer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = MODELS[name]
    torch.manual_seed(1)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), dtype=torch.bfloat16).eval()


def settings_for(folder: Path, *, load_format: str, graphs: bool = True) -> Any:
    """vLLM with captured graphs and without a compiler, which would cost minutes a start and change no weight."""
    from lockstep.rollout.vllm_start import VllmSettings

    captured = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
    return VllmSettings(
        model_folder=str(folder),
        load_format=load_format,  # pyright: ignore[reportArgumentType]
        max_model_len=512,
        num_slots=8,
        kv_cache_bytes=1 << 30,
        enforce_eager=not graphs,
        engine_args={"compilation_config": captured} if graphs else {},
    )


def start_engine(folder: Path, *, load_format: str = "dummy") -> Any:
    """``VllmEngine`` on the GPU with the registry of derived state."""
    from lockstep.refit.derived_vllm import registry
    from lockstep.rollout.vllm_engine import VllmEngine

    return VllmEngine(settings_for(folder, load_format=load_format), derived=registry(), device="cuda")


def greedy(engine: Any, vocabulary: int, num_prompts: int = 8, new_tokens: int = 32) -> list[list[int]]:
    """Greedy tokens of fixed random prompts, decoded together."""
    import numpy as np

    from lockstep.records import GenerateRequest, SamplingParams

    generator = np.random.default_rng(0)
    requests = [
        GenerateRequest(
            f"greedy-{i}",
            generator.integers(10, vocabulary, 24).astype(np.int32),
            SamplingParams(max_new_tokens=new_tokens, temperature=0.0),
        )
        for i in range(num_prompts)
    ]

    async def gather() -> list[Any]:
        return list(await asyncio.gather(*[engine.generate(request) for request in requests]))

    return [completion.tokens.tolist() for completion in asyncio.run(gather())]


def share_equal(one: list[list[int]], other: list[list[int]]) -> str:
    """``"250 of 256"`` equal tokens at equal places."""
    pairs = [(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"


def timed(action: Callable[[], Any]) -> float:
    """Seconds until the GPU is done."""
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


class Attempt:
    """Results by name; a part that raises is recorded as such and the others still run."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def __call__(self, name: str, action: Callable[[], Any]) -> Any:
        print(f"{name} …", file=sys.stderr, flush=True)
        begin = time.perf_counter()
        try:
            self.found[name] = action()
        except Exception as error:  # reported, not hidden: GPU time is scarce
            traceback.print_exc()
            self.found[name] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        print(f"{name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
        return self.found[name]


# --- measurements -----------------------------------------------------------------------------------------------------


def copy_bandwidth() -> float:
    """Bytes read and written per second of a copy of 4 GB on the card."""
    import torch

    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = median(timed(lambda: target.copy_(source)) for _ in range(10))
    return 2 * source.numel() / seconds


def plain_copy(source: Any, repeats: int) -> list[float]:
    """Seconds of copying every tensor of a source into its own place on the card."""
    import torch

    pairs = [(tensor, torch.empty_like(tensor)) for _, _, _, tensor in source.shards()]

    def copy() -> None:
        for tensor, target in pairs:
            target.copy_(tensor)

    return [timed(copy) for _ in range(repeats + 1)][1:]


def proof_probes(model: Any) -> Any:
    """Probes that reach every layer and as many experts as they can."""
    from lockstep.model.adapter import num_experts, routers
    from lockstep.refit.check import module_scores
    from lockstep.refit.probes import make_probes

    return make_probes(
        lambda sequences: module_scores(model, sequences),
        vocab_size=model.config.vocab_size,
        num_experts=num_experts(model) if routers(model) else 0,
        context=500,
        model_type=model.config.model_type,
    )


def proved_refits(
    engine: Any, model: Any, sets: dict[str, Any], probes: Any = None, *, scheme: Any = "none", bound: float = BOUND
) -> dict[str, Any]:
    """Two refits with verification and probes; the claims of both receipts. ``scheme``: how the engine's weights are
    quantised; the reference then computes with what that makes of the module's."""
    from lockstep.refit.behaves import Behaviour
    from lockstep.refit.check import module_scores
    from lockstep.refit.probes import holding
    from lockstep.refit.quantised import served_weights
    from lockstep.refit.transaction import run_refit
    from lockstep.refit.transports import make_transport

    probes = probes or proof_probes(model)
    shown: dict[str, Any] = {"coverage": probes.coverage.text()}
    for name, weights in sets.items():

        def reference(sequences: Any, weights: Any = weights) -> Any:
            with holding(model, served_weights(weights, scheme)):
                return module_scores(model, sequences)

        whose = "bfloat16" if scheme == "none" else scheme
        behaves = Behaviour(probes, engine.score, reference, bound=bound, bound_of=whose)
        behaves.before()
        receipt = run_refit(weights, engine.receiver(), make_transport("local"), verify=True, behaves=behaves)
        shown[name] = {claim.name: f"{claim.status}: {claim.detail}" for claim in receipt.claims}
        shown[name]["verify_s"] = receipt.verify_s
        changed = [f"{one.entry}: {one.num_changed} of {one.num_states}" for one in receipt.derived]
        shown[name]["derived_state"] = changed
    return shown


def silent_push(engine: Any, model: Any, weights: Any) -> dict[str, Any]:
    """Weights under transformers' names into vLLM's own reload, and the manifest's answer to the same names."""
    import numpy as np

    from lockstep.refit.check import module_scores
    from lockstep.refit.probes import holding, make_probes
    from lockstep.refit.transports import whole_tensors
    from lockstep.rollout.vllm_plain import push_plainly

    probes = make_probes(lambda s: module_scores(model, s), vocab_size=model.config.vocab_size, context=500)
    refusal = "accepted"
    try:
        # As a trainer would that takes its module's names for published ones.
        engine.receiver().begin(replace(weights.manifest(), naming="checkpoint"))
        engine.receiver().abort("this was a question")
    except ValueError as error:
        refusal = str(error)[:600]
    push_plainly(engine.llm, whole_tensors(weights))  # returns as after a success
    engine.refit_committed(weights.manifest().version)
    engine.refit_over()
    with holding(model, weights):
        expected = module_scores(model, probes.sequences)
    served = engine.score(probes.sequences, "prefill")
    difference = np.concatenate(
        [np.abs(served[s.sequence_id].logprobs - expected[s.sequence_id].logprobs)[1:] for s in probes.sequences]
    )
    return {"vllm": "success", "abs_diff_mean": float(difference.mean()), "manifest": refusal}


def phases(refit: Callable[[Any], Any], source: Any, repeats: int) -> dict[str, Any]:
    """Medians of each phase's seconds over refits with changed weights, the first left out. They are changed in place
    and before the clock, as an optimizer does it."""
    import torch

    found: dict[str, list[float]] = {"begin": [], "transfer": [], "commit": [], "pause_to_resume": []}
    receipt = refit(source)
    for index in range(repeats + repeats % 2):  # an even number, so that the weights end as they began
        for _, _, _, tensor in source.shards():
            if tensor.is_floating_point():
                tensor.mul_(2.0 if index % 2 else 0.5)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        receipt = refit(source)
        torch.cuda.synchronize()
        found["begin"].append(receipt.begin_s)
        found["transfer"].append(receipt.transfer_s)
        found["commit"].append(receipt.commit_s)
        found["pause_to_resume"].append(time.perf_counter() - begin)
    rate = 2 * receipt.transferred_bytes / median(found["transfer"])
    return {"median_s": {name: median(values) for name, values in found.items()}, "transfer_bytes_per_s": rate} | {
        "seconds": found, "bytes": receipt.transferred_bytes, "buckets": receipt.num_buckets,
    }  # fmt: skip


def local_phases(engine: Any, source: Any, repeats: int) -> dict[str, Any]:
    """The ``local`` transport into the engine of this process."""
    from lockstep.refit.transaction import run_refit
    from lockstep.refit.transports import make_transport

    transport = make_transport("local")
    return phases(lambda weights: run_refit(weights, engine.receiver(), transport, verify=False), source, repeats)


def ipc_phases(folder: Path, source: Any, repeats: int) -> dict[str, Any]:
    """``cuda_ipc`` into a vLLM in a process of its own, without graphs: a transfer does not use them."""
    from lockstep.config.schema import RefitConfig
    from lockstep.refit.engine_child import start_engine as start_process
    from lockstep.refit.transaction import run_refit
    from lockstep.refit.transports import make_transport

    settings = settings_for(folder, load_format="dummy", graphs=False)
    described = {"engine": "vllm", "threads": 4, "device": "cuda", "vllm": settings.as_dict()}
    shown: dict[str, Any] = {}
    engine = start_process(described, timeout_s=300.0)
    try:
        for megabytes in (64, 512):
            transport = make_transport("cuda_ipc", RefitConfig(bucket_bytes=megabytes << 20, timeout_s=300.0))
            shown[f"{megabytes} MB buckets"] = phases(
                lambda weights, transport=transport: run_refit(weights, engine.receiver(), transport, verify=False),
                source,
                repeats,
            )
        shown["profile"] = profile(engine, source, transport)
        receipt = run_refit(source, engine.receiver(), transport, verify=True)
        shown["claims"] = {claim.name: f"{claim.status}: {claim.detail}" for claim in receipt.claims}
    finally:
        engine.close()
    return shown


def own_loader(engine: Any, source: Any, repeats: int) -> dict[str, Any]:
    """vLLM's own ``load_weights``, tensor by tensor under checkpoint names, into the live parameters."""
    import torch

    from lockstep.refit.names import as_checkpoint
    from lockstep.refit.transports import whole_tensors
    from lockstep.rollout.vllm_hooks import served_model

    model = served_model(engine.llm)

    def load() -> None:
        with torch.no_grad():
            model.load_weights(whole_tensors(as_checkpoint(source)))  # pyright: ignore[reportCallIssue]

    seconds = [timed(load) for _ in range(repeats + 1)][1:]
    return {"median_s": median(seconds), "seconds": seconds}


def profile(engine: Any, source: Any, transport: Any) -> list[str]:
    """Where one refit spends this process' time: the 25 functions with most of it."""
    import cProfile
    import io
    import pstats

    from lockstep.refit.transaction import run_refit

    profiler = cProfile.Profile()
    profiler.runcall(run_refit, source, engine.receiver(), transport, verify=False)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(25)
    return text.getvalue().splitlines()


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Everything about one model."""
    import torch

    from lockstep.model.weights import ModelWeights
    from lockstep.refit.check import _folder
    from lockstep.refit.probes import OtherWeights
    from lockstep.refit.transports import make_transport

    attempt = Attempt()
    attempt("copy_bandwidth_bytes_per_s", copy_bandwidth)
    model = make_model(name)
    own, other = ModelWeights(model, version=2), OtherWeights(ModelWeights(model, version=1))
    num_bytes = sum(tensor.numel() * tensor.element_size() for _, _, _, tensor in own.shards())
    attempt.found |= {"model": name, "bytes": num_bytes, "gpu": torch.cuda.get_device_name()}
    with tempfile.TemporaryDirectory() as temporary:
        empty = _folder(model, None, Path(temporary) / "empty")
        full = _folder(model, own, Path(temporary) / "full")
        engine = start_engine(empty)
        attempt("proved", lambda: proved_refits(engine, model, {"other weights": other, "the model's": own}))
        refitted = attempt("greedy", lambda: greedy(engine, model.config.vocab_size))
        attempt("plain_copy", lambda: plain_copy(own, repeats))
        attempt("local", lambda: local_phases(engine, own, repeats))
        attempt.found["local_copies_directly"] = engine.receiver().copies_directly
        attempt("profile", lambda: profile(engine, own, make_transport("local")))
        attempt("own_load_weights", lambda: own_loader(engine, own, repeats))
        attempt("silent_push", lambda: silent_push(engine, model, other))
        attempt("after_the_push", lambda: proved_refits(engine, model, {"the model's": own}))
        engine.close()
        attempt("cuda_ipc", lambda: ipc_phases(empty, own, repeats))
        fresh = start_engine(full, load_format="safetensors")
        loaded = attempt("greedy_from_disk", lambda: greedy(fresh, model.config.vocab_size))
        attempt("greedy_equal", lambda: share_equal(refitted, loaded))
        fresh.close()
    return attempt.found


def main() -> None:
    """Parse arguments; each model in a process of its own; one JSON object on stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="a folder for one JSON file a model")
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(measure(options.model[0], options.repeats)))
        return
    report: dict[str, Any] = {"benchmark": "refit_gpu", "goals": [GOAL_SHARE_OF_COPY, GOAL_PAUSE_S]}
    for name in options.model:
        command = [sys.executable, "-m", "benchmarks.refit_gpu", "--alone", "--model", name]
        done = subprocess.run([*command, "--repeats", str(options.repeats)], stdout=subprocess.PIPE, text=True)
        lines = done.stdout.splitlines()
        report[name] = json.loads(lines[-1]) if done.returncode == 0 and lines else {"failed": done.returncode}
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"{name}.json").write_text(json.dumps(report[name], indent=1))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
