"""Chunked against full log-probs: time and peak memory of forward and backward through the head.

    python benchmarks/logprobs.py [--tokens 2048] [--repeats 3]

Every measurement is a fresh process (its peak memory is its own), variants take turns. JSON on stdout: seconds, peak
memory above the process before the head ran, full ÷ chunked as the ratio, and the time that the bare matrix products
would take at the matrix rate measured in the same processes (what limits it).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from statistics import median
from types import SimpleNamespace
from typing import Any

VOCABULARIES = {49_152: 576, 151_936: 1024}
"""Vocabulary: hidden size, of SmolLM2-135M and Qwen3-0.6B."""

VARIANTS = ("full", "chunked")


def measure(variant: str, vocabulary: int, num_tokens: int, repeats: int) -> dict[str, float]:
    """One process' share: median seconds, peak bytes above the start, matrix rate in FLOP/s. bfloat16."""
    import torch

    from lockstep.hardware.cpu import peak_rss_bytes
    from lockstep.train.token_logprobs import TokenLogProbs

    hidden_size = VOCABULARIES[vocabulary]
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(hidden_size, vocabulary, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * hidden_size**-0.5)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).bfloat16().requires_grad_()
    tokens = torch.randint(0, vocabulary, (num_tokens,), generator=generator)
    rows = torch.arange(num_tokens)
    rate = _matrix_rate(hidden.detach()[:512], head.weight.detach())
    # A model that is a head and nothing else.
    split: Any = SimpleNamespace(model=SimpleNamespace(lm_head=head), logits=head)
    chunked = TokenLogProbs(split, chunk_tokens=512)

    def run() -> torch.Tensor:
        if variant == "chunked":
            return chunked(hidden, rows, tokens)
        return torch.log_softmax(head(hidden).float(), -1).gather(1, tokens[:, None])[:, 0]

    start_bytes = peak_rss_bytes()
    seconds = []
    for _ in range(repeats):
        hidden.grad = head.weight.grad = None
        begin = time.perf_counter()
        run().sum().backward()
        seconds.append(time.perf_counter() - begin)
    return {"seconds": median(seconds), "peak_bytes": peak_rss_bytes() - start_bytes, "matrix_flops": rate}


def _matrix_rate(hidden: Any, weight: Any) -> float:
    product = hidden @ weight.T
    begin = time.perf_counter()
    for _ in range(3):
        product = hidden @ weight.T
    return 3 * 2.0 * product.numel() * hidden.shape[1] / (time.perf_counter() - begin)


def compare(vocabulary: int, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Both variants in turn, ``repeats`` processes each; medians and the ratio full ÷ chunked."""
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for _ in range(repeats):
        for variant in VARIANTS:
            command = [sys.executable, __file__, "--variant", variant, "--vocabulary", str(vocabulary)]
            command += ["--tokens", str(num_tokens), "--repeats", str(repeats)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[variant].append(json.loads(output))
    medians = {v: {key: median(run[key] for run in runs) for key in runs[0]} for v, runs in found.items()}
    rate = max(run["matrix_flops"] for runs in found.values() for run in runs)
    # Forward and two gradients; chunked runs the forward again for all but its last chunk of 512 rows.
    recomputed = 1.0 - min(1.0, 512 / num_tokens)
    product = 2.0 * num_tokens * vocabulary * VOCABULARIES[vocabulary]
    return {
        "vocabulary": vocabulary,
        "hidden_size": VOCABULARIES[vocabulary],
        "tokens": num_tokens,
        **{v: {"seconds": m["seconds"], "peak_bytes": m["peak_bytes"]} for v, m in medians.items()},
        "ratio": {key: medians["full"][key] / medians["chunked"][key] for key in ("seconds", "peak_bytes")},
        "matrix_flops": rate,
        "seconds_of_bare_products": {"full": 3 * product / rate, "chunked": (3 + recomputed) * product / rate},
    }


def main() -> None:
    """Parse arguments; print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--vocabulary", type=int, choices=sorted(VOCABULARIES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant is not None:
        print(json.dumps(measure(arguments.variant, arguments.vocabulary, arguments.tokens, arguments.repeats)))
        return
    results = [compare(vocabulary, arguments.tokens, arguments.repeats) for vocabulary in sorted(VOCABULARIES)]
    print(json.dumps({"benchmark": "logprobs", "results": results}, indent=2))


if __name__ == "__main__":
    main()
