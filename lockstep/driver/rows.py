"""The metrics row of a step and the line that the console shows of it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from datetime import UTC, datetime

from lockstep.config.checks import metric_word
from lockstep.records import OptimOutput, Rollout, Score
from lockstep.refit.transaction import Receipt

Row = dict[str, int | float | str | bool]

PHASES = {
    "time/step_s": "step",
    "time/rollout_s": "rollout",
    "time/score_s": "rollout/score",
    "time/logprobs_s": "logprobs",
    "time/train_s": "train",
    "time/optim_s": "optim",
    "time/refit_s": "refit",
    "time/eval_s": "eval",
    "time/save_s": "save",
}
"""Metric name → name of its span; one with a "/" lies inside a phase."""


def now_iso() -> str:
    """UTC time with seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def rollout_metrics(rollouts: Seq[Rollout], prefix: str) -> Row:
    """Means over the rollouts that have the value; one that no rollout has is absent."""
    scores = [rollout.score for rollout in rollouts]
    columns: dict[str, list[float]] = {
        "reward": [score.reward for score in scores if score.reward is not None],
        "accuracy": [float(score.correct) for score in scores if score.correct is not None],
        "format": [float(score.formatted) for score in scores if score.formatted is not None],
        "truncated": [float(rollout.status == "truncated") for rollout in rollouts],
        "length_tokens": [float(rollout.num_sampled_tokens) for rollout in rollouts],
    }
    for name in sorted({name for score in scores for name in score.parts}):
        values = [score.parts[name] for score in scores if score.parts.get(name) is not None]
        columns[f"part_{metric_word(name)}"] = [float(value) for value in values if value is not None]
    return {prefix.format(name): sum(values) / len(values) for name, values in columns.items() if values}


def unscored_counts(scores: Seq[Score], group: str = "rollout") -> Row:
    """Samples without a reward, and those of them whose grader or generation failed; the first failure in words."""
    errors = [score.error for score in scores if score.error is not None]
    row: Row = {f"{group}/unscored": sum(score.reward is None for score in scores)}
    row[f"{group}/failed"] = len(errors)
    return row | ({f"{group}/first_error": errors[0]} if errors else {})


def duplicate_share(rollouts: Seq[Rollout]) -> Row:
    """Share of samples that repeat an earlier one of their group token by token: near 1 when a policy has collapsed,
    or when seeds are not different per sample."""
    seen: set[tuple[str, bytes]] = set()
    num_repeated = 0
    for rollout in rollouts:
        key = (rollout.group_id, b"".join(s.tokens[s.loss_mask].tobytes() for s in rollout.sequences))
        num_repeated += key in seen
        seen.add(key)
    return {"rollout/duplicate_share": num_repeated / len(rollouts)} if rollouts else {}


def optimizer_metrics(output: OptimOutput) -> dict[str, float]:
    """Rate and gradient norm of an optimizer step, and whether it moved the weights or was skipped for want of a
    gradient: a norm is absent then."""
    moved = output.grad_norm is not None
    counts = {"optimizer_steps/moved": float(moved), "optimizer_steps/skipped": float(not moved)}
    norm = {} if output.grad_norm is None else {"grad_norm": output.grad_norm}
    return norm | {"learning_rate": output.learning_rate} | counts


def over_optimizer_steps(metrics: Seq[Mapping[str, float]]) -> Row:
    """Metrics of the optimizer steps that shared a batch as one: counts add up, everything else is the mean over the
    steps that have it."""
    values: dict[str, list[float]] = {}
    for of_step in metrics:
        for name, value in of_step.items():
            values.setdefault(name, []).append(value)
    return {
        name: sum(column)
        if name.startswith(("corrections/", "optimizer_steps/")) and not name.endswith("_mean")
        else sum(column) / len(column)
        for name, column in values.items()
    }


def time_metrics(totals_s: Mapping[str, float], generated_tokens: int, trained_tokens: int) -> Row:
    """Seconds by phase and tokens per second; a phase that did not run is absent."""
    row: Row = {name: totals_s[phase] for name, phase in PHASES.items() if phase in totals_s}
    for name, tokens, phase in (
        ("throughput/generated_tokens_per_s", generated_tokens, "rollout/generate"),
        ("throughput/trained_tokens_per_s", trained_tokens, "train"),
    ):
        if totals_s.get(phase):
            row[name] = tokens / totals_s[phase]
    return row


def refit_metrics(receipt: Receipt) -> Row:
    """What the step line and the report show of a refit."""
    return {
        "refit/version": receipt.version,
        "refit/transferred_bytes": receipt.transferred_bytes,
        "refit/transfer_s": receipt.transfer_s,
        "refit/commit_s": receipt.commit_s,
        "refit/verify_s": receipt.verify_s,
        "refit/claims_held": sum(claim.status == "held" for claim in receipt.claims),
        "refit/claims_checked": sum(claim.status != "not checked" for claim in receipt.claims),
    }


def _claims(row: Row) -> str:
    held = row.get("refit/claims_held")
    return f", {held} claim{'' if held == 1 else 's'} held" if held else ""


STYLES = {"pass": "green", "warn": "yellow", "correct": "yellow", "stop": "bold red", "unjudged": "yellow"}


def step_line(row: Row, num_steps: int) -> str:
    """One rich-markup line: reward, agreement, verdict, throughput, refit. Only what the row holds is shown."""

    def shown(key: str, text: str) -> list[str]:
        return [text.format(row[key])] if key in row else []

    status = str(row["verdict/status"])
    agreement = shown(f"agreement/{row['agreement/metric']}", f"{row['agreement/metric']} {{:.2g}}")
    return " · ".join(
        [
            f"[bold]step {row['step']}/{num_steps}[/bold]",
            *shown("reward/mean", "reward {:.3f}"),
            *shown("accuracy/mean", "correct {:.2f}"),
            *shown("format/mean", "form {:.2f}"),
            *(agreement or ["agreement not measured"]),
            f"[{STYLES[status]}]{status}[/{STYLES[status]}] (bound {row['agreement/bound']:.2g})",
            *([f"[yellow]{row['agreement/unseen']} tokens not judged[/yellow]"] if row.get("agreement/unseen") else []),
            *([f"[red]unscored {row['rollout/unscored']}[/red]"] if row.get("rollout/unscored") else []),
            *(["[yellow]nothing learned[/yellow]"] if "idle/why" in row else []),
            *shown("throughput/generated_tokens_per_s", "sampled {:.0f} tok/s"),
            *shown("throughput/trained_tokens_per_s", "trained {:.0f} tok/s"),
            *(one + _claims(row) for one in shown("time/refit_s", "refit {:.2f} s")),
            *shown("time/step_s", "{:.1f} s"),
        ]
    )
