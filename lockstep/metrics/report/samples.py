"""Which recorded rollouts go into the page, and in which form.

A page must stay light enough to open anywhere, so samples get a budget in bytes. Steps are taken in the order last,
first, then evenly in between; a step that does not fit whole gives its first rollouts. The page says what it holds.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from lockstep.metrics.report.collect import RunData
from lockstep.metrics.rollout_file import RecordedSequence
from lockstep.metrics.run_folder import read_rollouts

MAX_SAMPLE_BYTES = 9_000_000
MAX_STEPS = 40
MAX_STEP_SHARE = 0.25
"""Of the page's budget, so that a step with very long rollouts leaves room for others to compare it with."""

MAX_TOKENS = 2_000
"""Completion tokens shown per sample; the differences of the rest are not on the page, and it says so."""

MAX_PROMPT_CHARACTERS = 8_000

Sample = dict[str, object]


def choose_samples(run: RunData, max_bytes: int = MAX_SAMPLE_BYTES) -> dict[str, object]:
    """``steps``: samples by step, as the page's script wants them; ``note``: which steps are there, and why."""
    chosen: dict[int, list[Sample]] = {}
    cut_steps: list[int] = []
    left = max_bytes
    for step in spread(run.rollout_steps, MAX_STEPS):
        samples, used, total = _fitting(run.path, step, min(left, int(max_bytes * MAX_STEP_SHARE)))
        if not samples and total:
            break
        chosen[step] = samples
        left -= used
        if len(samples) < total:
            cut_steps.append(step)
    return {"steps": {str(step): chosen[step] for step in sorted(chosen)}, "note": _note(run, chosen, cut_steps)}


def spread(steps: list[int], count: int) -> list[int]:
    """At most ``count`` of the steps: the last, the first, then evenly in between, widest gap first."""
    if len(steps) <= 2:
        return steps[::-1][:count]
    order, gaps = [len(steps) - 1, 0], [(0, len(steps) - 1)]
    while gaps and len(order) < count:
        gaps.sort(key=lambda gap: gap[0] - gap[1])
        low, high = gaps.pop(0)
        if high - low < 2:
            continue
        middle = (low + high) // 2
        order.append(middle)
        gaps += [(low, middle), (middle, high)]
    return [steps[index] for index in order[:count]]


def _fitting(path: Path, step: int, max_bytes: int) -> tuple[list[Sample], int, int]:
    """Samples of a step that fit, their bytes, and how many the step has."""
    sequences = read_rollouts(path, step)
    samples: list[Sample] = []
    used = 0
    for sequence in sequences:
        sample = _sample(sequence)
        size = len(json.dumps(sample, ensure_ascii=False).encode("utf-8", "backslashreplace"))
        if used + size > max_bytes:
            break
        samples.append(sample)
        used += size
    return samples, used, len(sequences)


def _note(run: RunData, chosen: dict[int, list[Sample]], cut_steps: list[int]) -> str:
    if not run.rollout_steps:
        return "No rollouts were recorded."
    num_samples = sum(len(samples) for samples in chosen.values())
    if len(chosen) == len(run.rollout_steps) and not cut_steps:
        return f"All {num_samples} samples of all {len(chosen)} recorded steps."
    listed = ", ".join(map(str, sorted(chosen))) or "none"
    note = (
        f"{num_samples} samples of steps {listed} are in this page, out of {len(run.rollout_steps)} recorded steps; "
        "the folder rollouts/ has the rest."
    )
    if cut_steps:
        note += f" Not all samples fit for steps {', '.join(map(str, sorted(cut_steps)))}."
    return note


def _sample(recorded: RecordedSequence) -> Sample:
    sequence = recorded.sequence
    sampled = np.flatnonzero(sequence.loss_mask)
    start = int(sampled[0]) if len(sampled) else len(sequence.tokens)
    stop = min(len(sequence.tokens), start + MAX_TOKENS)
    span = slice(start, stop)
    mask = sequence.loss_mask[span]
    texts = recorded.token_texts
    train = None if recorded.train_logprobs is None else recorded.train_logprobs[span]
    prompt = recorded.prompt_text if texts is None else "".join(texts[:start])
    cut = len(sequence.tokens) - stop
    return {
        "mask": [int(value) for value in mask],
        "ids": sequence.tokens[span].tolist(),
        "versions": sequence.versions[span].tolist(),
        "rollout": _numbers(sequence.logprobs[span], mask),
        "train": _numbers(train, mask),
        "diff": _differences(train, sequence.logprobs[span], mask),
        "parts": {name: value for name, value in recorded.parts.items() if value is not None},
        "reward": recorded.reward,
        "id": f"{recorded.rollout_id} / {sequence.sequence_id}",
        "group": recorded.group_id,
        "problem": recorded.problem_id,
        "prompt": _shortened(prompt),
        "completion": recorded.completion_text if len(recorded.completion_text) < 4 * MAX_TOKENS else "",
        "tokens": [f"⟨{token}⟩" for token in sequence.tokens[span]] if texts is None else list(texts[span]),
        "status": recorded.status,
        "correct": recorded.correct,
        "formatted": recorded.formatted,
        "answer": recorded.answer,
        "error": recorded.score_error,
        "cut": f"{cut:,} further tokens are not on this page." if cut else None,
    }


def _shortened(prompt: str) -> str:
    if len(prompt) <= MAX_PROMPT_CHARACTERS:
        return prompt
    half = MAX_PROMPT_CHARACTERS // 2
    return f"{prompt[:half]}\n… {len(prompt) - 2 * half:,} characters left out …\n{prompt[-half:]}"


def _numbers(values: np.ndarray | None, mask: np.ndarray) -> list[float | None]:
    if values is None:
        return [None] * len(mask)
    return [_rounded(value) if counted else None for value, counted in zip(values.tolist(), mask, strict=True)]


def _differences(train: np.ndarray | None, rollout: np.ndarray, mask: np.ndarray) -> list[float | None]:
    """train − rollout in float64, before rounding, so that small differences of large log-probs survive."""
    if train is None:
        return [None] * len(mask)
    with np.errstate(invalid="ignore"):
        difference = train.astype(np.float64) - rollout.astype(np.float64)
    return _numbers(difference, mask)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
