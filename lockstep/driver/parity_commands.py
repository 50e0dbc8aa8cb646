"""The commands ``parity measure``, ``parity replay`` and ``parity attribute``: load, score, print; exit code as result.

Each takes a run's folder (its recorded batch is scored again) or a recipe (a batch is sampled now).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
import rich.table

from lockstep.agreement import Agreement
from lockstep.config.schema import BoundConfig
from lockstep.driver.environment import launched
from lockstep.driver.evidence import Evidence, ReplayError, from_recipe, from_run, vllm_scores, with_options
from lockstep.interfaces import LogProbs
from lockstep.parity.attribute import Attribution, Scores, Trial, attribute, sentence
from lockstep.parity.bootstrap import METRICS, metric_value
from lockstep.parity.factors import builtin_factors, choose_factors
from lockstep.parity.measure import measure_scores
from lockstep.parity.plan import Deployment, Measured, measure_pairs, plan
from lockstep.records import Sequence

DONE, FAILED = 0, 1
WIDTH_IN_A_FILE = 200
MOST_NAMES = 4
SHOWN = ("abs_diff/mean", "abs_diff/p99", "abs_diff/max", "k3")


def say(text: str) -> None:
    """A sentence for the person who watches, on stderr."""
    rich.console.Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False).print(text)


def print_table(title: str, columns: Seq[str], rows: Seq[Seq[str]]) -> None:
    """A table on stdout; first column at the left, numbers at the right, nothing cut off where there is no terminal."""
    table = rich.table.Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column in ("isolates", "judgement") else "right")
    for row in rows:
        table.add_row(*row)
    console = rich.console.Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH_IN_A_FILE
    console.print(table)


@contextmanager
def evidence_of(target: str, overrides: Seq[str], step: int | None) -> Iterator[Evidence]:
    """A run's folder by its path, or a recipe by name or file. Raises ReplayError for overrides of a recorded run."""
    if Path(target).is_dir():
        if overrides:
            raise ReplayError("a recorded run has its own configuration: --set is for recipes")
        evidence = from_run(Path(target), step)
        with launched(evidence.config):
            yield evidence
        return
    if step is not None:
        raise ReplayError(f"{target} is no folder of a run, and a recipe has no recorded step")
    from lockstep.recipes import load_recipe

    with from_recipe(load_recipe(target, overrides).config, say) as evidence:
        yield evidence


def _note(evidence: Evidence) -> str:
    """Which weights, and whether another engine sampled than the one that scores again."""
    engine = evidence.config.rollout.engine
    elsewhere = "" if engine == "torch" else f"; sampled by {engine}, scored again by the embedded engine"
    return evidence.note + elsewhere


def measure(target: str, overrides: Seq[str], step: int | None, *, as_json: bool) -> int:
    """Every pair that the deployment needs, as a table. Returns 1 if one is above the bound or was not measured."""
    with evidence_of(target, overrides, step) as evidence:
        bounds = {bound.metric: bound.bound for bound in evidence.bounds}
        pairs = plan(Deployment.of(evidence.config))
        say(f"{_note(evidence)}; {len(evidence.bench.recorded)} sequences")
        if evidence.updated is None:
            left_out = [pair.name for pair in pairs if pair.second == "updated"]
            pairs = tuple(pair for pair in pairs if pair.second != "updated")
            for name in left_out:
                say(f"{name} (staleness) is not measured: there is no checkpoint of step {evidence.step} itself")
        results = measure_pairs(evidence.bench, pairs, bounds, evidence.updated)
    if as_json:
        print(json.dumps({"note": _note(evidence), "exact": evidence.exact, "pairs": [_plain(one) for one in results]}))
    else:
        rows = [[one.pair.name, one.pair.isolates, *_numbers(one.agreement), _word(one)] for one in results]
        title = ", ".join(f"{metric} bound {bound:g}" for metric, bound in bounds.items())
        print_table(title, ["pair", "isolates", *SHOWN, "tokens", "judgement"], rows)
        means = [one.agreement.metrics.get("abs_diff/mean") for one in results if one.pair.judged]
        finite = not any(one.agreement.num_nonfinite for one in results if one.pair.judged)
        if finite and all(mean is not None for mean in means):  # else the pairs are not about the same tokens
            total = sum(mean or 0.0 for mean in means[:-1])
            print(f"the links add up to {total:.3g}; their ends differ by {means[-1]:.3g}, which can't be more")
    return DONE if all(one.holds for one in results if one.pair.judged) else FAILED


def replay(
    run_dir: Path,
    step: int,
    *,
    engine: str,
    dtype: str | None,
    device: str | None,
    path: str,
    as_json: bool,
) -> int:
    """Score a recorded batch again on ``engine`` ("torch", "vllm" or "trainer") and hold it against what the run
    recorded. vLLM is started anew and refitted with the trainer's weights, its claims checked."""
    evidence = with_options(from_run(run_dir, step, device, judged=False), dtype=dtype, path=path)
    bench, setting = evidence.bench, evidence.bench.setting
    if engine == "trainer":
        trainer = setting.trainer.model_copy(update={"dtype": dtype or setting.trainer.dtype})
        scored = bench.trainer_scores(replace(setting, trainer=trainer))
        what = f"trainer in {trainer.dtype}"
    elif engine == "vllm":
        scored, claims = vllm_scores(evidence)
        what = f"vLLM in {setting.rollout.dtype} by {setting.path}, refitted with the trainer's weights ({claims})"
    else:
        scored = bench.engine_scores(setting)[0]
        name = "engine" if evidence.config.rollout.engine == "torch" else "embedded engine"
        what = f"{name} in {setting.rollout.dtype} by {setting.path}"
        if bench.served:
            what += f", with the {len(bench.served)} tensors that it served differently from the trainer"
    ours, theirs = _recorded(evidence, trainer=True), _recorded(evidence, trainer=False)
    seen = _seen(evidence)
    rows = {
        "recorded trainer/recorded engine": measure_scores(ours, theirs, *seen),
        "recorded trainer/replayed": measure_scores(ours, scored, *seen),
        "replayed/recorded engine": measure_scores(scored, theirs, bench.fresh, bench.rollout_ids),
    }
    if unseen := len(bench.recorded) - len(seen[0]):
        say(f"the run's trainer has not scored {unseen} of {len(bench.recorded)} sequences: its rows are without them")
    say(f"{evidence.note}\nreplayed: {what}, on {next(bench.model.parameters()).device}")
    if as_json:
        shown = {name: _finite(agreement.flat("")) for name, agreement in rows.items()}
        print(json.dumps({"exact": evidence.exact, "note": evidence.note, "replayed": what, "pairs": shown}))
    else:
        table = [[name, *_numbers(agreement)] for name, agreement in rows.items()]
        print_table(f"step {step}", ["pair", *SHOWN, "tokens"], table)
    return DONE


def find_cause(
    target: str,
    overrides: Seq[str],
    step: int | None,
    *,
    factors: Seq[str],
    budget: int,
    full: bool,
    as_json: bool,
) -> int:
    """Attribute a failing agreement. Returns 1 if it fails and is not explained by the factors."""
    with evidence_of(target, overrides, step) as evidence:
        say(f"{_note(evidence)}; {len(evidence.bench.recorded)} sequences")
        result, told = attribute_evidence(evidence, factors, budget, full=full)
        first = None if result.status == "healthy" else evidence.bench.first_difference()
    if as_json:
        found = {"sentence": told, "first_module": first and first.module, **_plain_result(result)}
        print(json.dumps({"note": _note(evidence), "exact": evidence.exact, **found}))
    else:
        print_attribution(result)
        print(told)
        if first is not None:
            print(f"first module whose output differs with the weights that were served: {first.text()}")
    return DONE if result.status == "explained" or "nothing to explain" in told else FAILED


def attribute_evidence(
    evidence: Evidence, factors: Seq[str] = (), budget: int = 40, *, full: bool = False
) -> tuple[Attribution, str]:
    """The attribution and its sentence. A batch whose recorded difference fails, but which agrees when it is scored
    again, is *unexplained*: what caused it is not among the things that re-scoring rebuilds."""
    bench = evidence.bench
    recorded = bench.as_recorded()
    bound = _judged_bound(evidence, recorded)
    chosen = choose_factors(builtin_factors(bench), factors)
    result = attribute(bench.evaluator(chosen), chosen, bound.bound, budget, metric=bound.metric, full=full)
    told = sentence(result)
    if result.status == "healthy" and recorded is not None and _fails(recorded, bound):
        engine = evidence.config.rollout.engine
        kernels = "" if engine == "torch" else f"the kernels of {engine}, "
        told = (
            f"unexplained: scored again, {bound.metric} is {result.unchanged.value:.4g} and within the bound "
            f"{bound.bound:g}, but the run recorded {_value(recorded, bound.metric)}. The cause is in what is not "
            f"rebuilt here: {kernels}batches and requeues while sampling, cached prefixes, the sampler, or state that "
            "ended with the process"
        )
    return result, told


def _judged_bound(evidence: Evidence, recorded: Scores | None) -> BoundConfig:
    """Of the bounds that the recorded batch fails, the one that it exceeds most (the verdict's); else the first that
    can be resampled. Raises ReplayError if there is none, or if all that it fails are on metrics that can't be."""
    usable = [bound for bound in evidence.bounds if bound.metric in METRICS]
    if not usable:
        names = ", ".join(bound.metric for bound in evidence.bounds)
        raise ReplayError(f"no bound of this run is on a metric that can be resampled by rollout: {names}")
    failed = [bound for bound in usable if recorded is not None and _fails(recorded, bound)]
    if not failed and recorded is not None and (others := _failed_elsewhere(evidence)):
        raise ReplayError(
            f"the recorded batch is above its bound on {', '.join(others)}, which can't be resampled by rollout; those "
            f"that can, {', '.join(bound.metric for bound in usable)}, are within theirs"
        )
    return max(failed, key=lambda bound: _share(recorded, bound), default=usable[0])


def _failed_elsewhere(evidence: Evidence) -> list[str]:
    """Bounded metrics that can't be resampled and are above their bound in the recorded batch."""
    ours, theirs = _recorded(evidence, trainer=True), _recorded(evidence, trainer=False)
    metrics = measure_scores(ours, theirs, *_seen(evidence)).metrics
    others = [bound for bound in evidence.bounds if bound.metric not in METRICS]
    return [bound.metric for bound in others if not (metrics.get(bound.metric) or 0.0) <= bound.bound]


def _fails(scores: Scores, bound: BoundConfig) -> bool:
    every = np.concatenate(scores.differences)
    return bool(scores.num_nonfinite) or (len(every) > 0 and metric_value(bound.metric, every) > bound.bound)


def _share(scores: Scores | None, bound: BoundConfig) -> float:
    every = np.concatenate(scores.differences) if scores is not None else np.empty(0)
    return metric_value(bound.metric, every) / bound.bound if len(every) else 0.0


def _value(scores: Scores, metric: str) -> str:
    every = np.concatenate(scores.differences)
    value = f"{metric_value(metric, every):.4g}" if len(every) else "undefined"
    return f"{value} with {scores.num_nonfinite} tokens not finite" if scores.num_nonfinite else value


def print_attribution(result: Attribution) -> None:
    """Each evaluated set with its value, effect, noise, judgement and price."""
    rows = [_trial_row(trial) for trial in result.trials]
    columns = ["factors", result.metric, "effect", "noise (99 %)", "judgement", "price"]
    print_table(f"bound {result.bound:g}; {len(result.trials)} of {result.budget} runs", columns, rows)
    for one in result.interactions:
        within = " (inside the noise)" if one.noise is not None and one.noise.holds_zero else ""
        print(f"together {one.first} and {one.second} do {one.excess:+.3g} more than the sum of each alone{within}")


def _trial_row(trial: Trial) -> list[str]:
    noise = "" if trial.noise is None else f"{_change(trial.noise.high)} to {_change(trial.noise.low)}"
    return [
        _label(trial),
        "undefined" if trial.value is None else f"{trial.value:.4g}",
        "" if trial.effect is None else _change(trial.effect),
        noise,
        {"noise": "inside the noise", "unknown": ""}.get(trial.judgement, trial.judgement)
        + (f": {trial.refused}" if trial.refused else ""),
        "" if trial.price is None else f"{-100 * trial.price:+.0f} % tok/s",
    ]


def _change(effect: float) -> str:
    """An effect, of which more is better, as the change of the metric, of which less is; 0 has no sign of its own."""
    return f"{0.0 - effect:+.3g}"


def _label(trial: Trial) -> str:
    """The factors by name; of many, the first and the last in the order of their numbers."""
    names = sorted(trial.factors, key=lambda name: [int(p) if p.isdigit() else -1 for p in re.split(r"[.:]", name)])
    if len(names) > MOST_NAMES:
        return f"{len(names)} factors: {names[0]} … {names[-1]}"
    return " + ".join(names) or "(nothing changed)"


def _recorded(evidence: Evidence, *, trainer: bool) -> dict[str, LogProbs]:
    """What one side recorded in the run; without the sequences that the trainer did not score."""
    version, found = evidence.bench.version, {}
    for one in evidence.bench.recorded:
        values = one.train_logprobs if trainer else one.sequence.logprobs
        if values is not None:
            found[one.sequence.sequence_id] = LogProbs(values, version)
    return found


def _seen(evidence: Evidence) -> tuple[list[Sequence], list[str]]:
    """Sequences that the run's trainer scored, and their rollouts."""
    bench = evidence.bench
    rows = zip(bench.fresh, bench.recorded, strict=True)
    seen = [(sequence, one.rollout_id) for sequence, one in rows if one.train_logprobs is not None]
    return [sequence for sequence, _ in seen], [rollout_id for _, rollout_id in seen]


def _numbers(agreement: Agreement) -> list[str]:
    values = [agreement.metrics.get(name) for name in SHOWN]
    tokens = str(agreement.num_tokens)
    if agreement.num_nonfinite:
        tokens += f" (+{agreement.num_nonfinite} not finite)"
    return [*("" if value is None else f"{value:.3g}" for value in values), tokens]


def _word(one: Measured) -> str:
    if not one.pair.judged:
        return "told, not judged"
    return "unjudged" if one.holds is None else "holds" if one.holds else f"ABOVE THE BOUND on {one.metric}"


def _plain(one: Measured) -> dict[str, Any]:
    pair = one.pair
    return {
        "pair": pair.name,
        "isolates": pair.isolates,
        "reason": pair.reason,
        "metric": one.metric,
        "bound": one.bound,
        "holds": one.holds,
        **_finite(one.agreement.flat("")),
    }


def _plain_result(result: Attribution) -> dict[str, Any]:
    return {
        "status": result.status,
        "metric": result.metric,
        "bound": result.bound,
        "budget": result.budget,
        "minimal": [sorted(names) for names in result.minimal],
        "refined": {name: sorted(parts) for name, parts in result.refined.items()},
        "trials": [_plain_trial(trial) for trial in result.trials],
        "interactions": [
            {"factors": [one.first, one.second], "excess": one.excess, "noise": _ends(one.noise)}
            for one in result.interactions
        ],
    }


def _plain_trial(trial: Trial) -> dict[str, Any]:
    return {
        "factors": sorted(trial.factors),
        "value": trial.value,
        "nonfinite": trial.num_nonfinite,
        "effect": trial.effect,
        "noise": _ends(trial.noise),
        "judgement": trial.judgement,
        "refused": trial.refused,
        "tokens_per_s": trial.tokens_per_s,
        "price": trial.price,
    }


def _ends(noise: Any) -> list[float] | None:
    return None if noise is None else [noise.low, noise.high]


def _finite(values: dict[str, float]) -> dict[str, float | str]:
    """JSON has no NaN: such a number is its text."""
    return {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
