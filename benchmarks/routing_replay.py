"""What routing replay is worth: bfloat16 engine against bfloat16 trainer, with the engine's experts and without.

    python -m benchmarks.routing_replay [--seeds 3] [--models qwen3_moe deepseek_v3 deepseek_v4 glm_moe_dsa]

A tiny random MoE samples completions token by token; the trainer scores the same tokens in packed forwards of the same
weights. All that differs is the order of roundings, and what follows from it: experts picked differently. JSON on
stdout: for each model k3, |d| and the share of equal expert sets, by seed and as the ratio of medians without ÷ with;
bytes of the ids beside int64; and how long a forward and backward takes with and without.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import time
from statistics import median
from typing import Any

import numpy as np

_BASE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 512,
    # Large enough that experts matter for the output, as they do in a trained model.
    "initializer_range": 0.15,
}
_LATENT: dict[str, Any] = {
    **_BASE,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
_INDEXER: dict[str, Any] = {"index_n_heads": 64, "index_head_dim": 32, "index_topk": 256}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_BASE, "head_dim": 16, "num_experts": 32, "norm_topk_prob": True},
    "deepseek_v3": _LATENT,
    "glm_moe_dsa": {**_LATENT, **_INDEXER},
    "deepseek_v4": {
        **_BASE,
        **_INDEXER,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "q_lora_rank": 32,
        "o_lora_rank": 16,
        "o_groups": 2,
        "qk_rope_head_dim": 16,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_hash_layers": 1,
        "hc_mult": 2,
        "sliding_window": 16,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
}
METRICS = ("k3", "abs_diff/mean", "abs_diff/p99", "abs_diff/max", "route_agree")


def sampled(model: Any, num_prompts: int, group_size: int, num_tokens: int, seed: int) -> list[Any]:
    """Sequences that a bfloat16 engine with the weights of ``model`` sampled, with its expert ids."""
    from lockstep.config.schema import RolloutConfig
    from lockstep.driver.groups import sequence_of
    from lockstep.records import GenerateRequest, SamplingParams
    from lockstep.rollout.torch_engine import TorchEngine

    config = RolloutConfig(dtype="bfloat16", record_routes=True, max_new_tokens=num_tokens)
    engine = TorchEngine(copy.deepcopy(model), config)
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(3, 99, int(generator.integers(8, 24))).astype(np.int32) for _ in range(num_prompts)]
    requests = [
        GenerateRequest(
            f"{p}/{member}", prompt, SamplingParams(num_tokens, seed=1000 * seed + 100 * p + member), want_routes=True
        )
        for p, prompt in enumerate(prompts)
        for member in range(group_size)
    ]

    async def generate() -> list[Any]:
        return list(await asyncio.gather(*(engine.generate(request) for request in requests)))

    completions = asyncio.run(generate())
    return [sequence_of(request.prompt_tokens, found) for request, found in zip(requests, completions, strict=True)]


def compare(
    model_type: str, seed: int, *, num_prompts: int = 8, group_size: int = 4, num_tokens: int = 48
) -> dict[str, Any]:
    """Agreement of one random model with itself, without and with replay; bytes of ids; seconds of a training pass."""
    import torch

    from lockstep.config.schema import RandomModel, TrainerConfig
    from lockstep.interfaces import LogProbs
    from lockstep.model.load import load_model
    from lockstep.parity.measure import measure_scores
    from lockstep.train.fsdp import FsdpTrainer

    source = RandomModel(model_type=model_type, config=MODELS[model_type], seed=seed)
    model = load_model(source, torch.bfloat16)
    sequences = sampled(model, num_prompts, group_size, num_tokens, seed)
    engine = {s.sequence_id: LogProbs(s.logprobs, 0, s.routes) for s in sequences}
    result: dict[str, Any] = {"model": model_type, "seed": seed}
    for name, replay in (("without", False), ("with", True)):
        config = TrainerConfig(dtype="bfloat16", routing_replay=replay)
        trainer = FsdpTrainer(model, config, total_optimizer_steps=1, temperature=1.0)
        agreement = measure_scores(trainer.logprobs(sequences, routes=True), engine, sequences)
        result[name] = {metric: agreement.metrics[metric] for metric in METRICS}
        result[name]["routes"] = {label: bucket.abs_diff_mean for label, bucket in agreement.buckets["routes"].items()}
        result[name]["seconds"] = _seconds_of_training(trainer, sequences)
    result["tokens"] = agreement.num_tokens
    result["ids"] = {
        "dtype": str(sequences[0].routes.dtype),
        "bytes": sum(s.routes.nbytes for s in sequences),
        "bytes_as_int64": sum(8 * s.routes.size for s in sequences),
    }
    return result


def _seconds_of_training(trainer: Any, sequences: list[Any]) -> float:
    from lockstep.config.schema import AlgorithmConfig
    from lockstep.records import Batch, TrainSequence
    from lockstep.train.objective import PolicyObjective

    items = tuple(
        TrainSequence(s, s.sequence_id, s.loss_mask, np.full(len(s.tokens), 1.0 - 2 * (i % 2), np.float32))
        for i, s in enumerate(sequences)
    )
    seconds = 0.0
    for _ in range(2):  # the first pass only warms up
        begin = time.perf_counter()
        trainer.forward_backward(Batch(items), PolicyObjective(AlgorithmConfig()))
        seconds = time.perf_counter() - begin
        trainer.drop_gradients()
    return seconds


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the seeds of one model, and the ratio without ÷ with."""
    names = ("k3", "abs_diff/mean", "abs_diff/p99", "abs_diff/max", "seconds")
    medians = {side: {name: median(run[side][name] for run in runs) for name in names} for side in ("without", "with")}
    ratios = {name: medians["without"][name] / medians["with"][name] for name in names}
    return {"model": runs[0]["model"], "median": medians, "without_over_with": ratios, "runs": runs}


def main() -> None:
    """Parse arguments; print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    arguments = parser.parse_args()
    results = [summary([compare(name, seed) for seed in range(arguments.seeds)]) for name in arguments.models]
    print(json.dumps({"benchmark": "routing_replay", "results": results}, indent=2))


if __name__ == "__main__":
    main()
