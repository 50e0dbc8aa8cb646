"""From an agreement that fails to its cause: the same recorded tokens, scored anew under changed factors.

::

    nothing changed ─ healthy? ─▶ "healthy": there is nothing to explain
    each factor alone ─ one restores? ─▶ it is a minimal set by itself
    joint: the helpful ones, all but the harmful ones, all, then pairs ─ restores? ─▶ ddmin ─▶ a minimal set
    a factor made of parts (all weights = layers) ─▶ ddmin over the parts
    nothing restores ─▶ "unexplained": the cause is outside the named factors

``ddmin`` is Zeller's delta debugging ("Simplifying and Isolating Failure-Inducing Input", 2002) with "healthy" as the
property that is kept: what it returns is minimal in the sense that no single member can be left out. Every evaluation
counts against the budget, and no set is evaluated twice. This file knows no model: ``evaluate`` does the scoring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

import numpy as np

from lockstep.parity.bootstrap import Interval, interval, metric_value, resampled

Status = Literal["healthy", "explained", "unexplained", "undecided"]
Judgement = Literal["restores", "improves", "worsens", "noise", "unknown", "refused"]
Names = frozenset[str]

MIN_SHARE = 0.02
"""An effect below this share of the failing value counts as none, whatever its interval says: another order of
summation moves every token a little and always the same way, and is no cause."""
MAX_LATTICE = 4
"""Minimal sets up to this size get all their subsets evaluated, for the interactions."""
DEFAULT_BUDGET = 40


@dataclass(frozen=True, slots=True)
class Factor:
    """Something that can be changed. ``change`` is for the evaluator (``replay.Bench``: Setting → Setting).

    ``parts``: finer factors that together are this one (all weights reloaded = each layer reloaded); they are searched
    only after the whole has been found to matter.
    """

    name: str
    says: str
    change: Callable[[Any], Any] | None = None
    parts: tuple[Factor, ...] = ()


@dataclass(frozen=True, slots=True)
class Scores:
    """One evaluation: d = l_train − l_roll of the finite eligible tokens of each rollout, how many tokens were not
    finite on either side, seconds of the engine's scoring, and tokens scored in that time. ``refused``: why these
    factors could not be applied (then there are no differences)."""

    differences: tuple[np.ndarray, ...]
    num_nonfinite: int = 0
    seconds: float = 0.0
    num_scored: int = 0
    refused: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        """Throughput of the scoring; None if it was not timed."""
        return self.num_scored / self.seconds if self.seconds > 0 and self.num_scored else None


Evaluate = Callable[[Names], Scores]


@dataclass(frozen=True, slots=True)
class Trial:
    """One evaluated set of factors against the unchanged case.

    ``value`` None: no finite token. ``effect`` = unchanged − value (positive: better); ``noise`` is its bootstrap
    interval (None with fewer than two rollouts). ``price``: share of throughput lost (negative: faster), None untimed.
    """

    factors: Names
    value: float | None
    num_nonfinite: int
    effect: float | None
    noise: Interval | None
    judgement: Judgement
    tokens_per_s: float | None
    price: float | None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Interaction:
    """Two factors together against the sum of each alone: ``excess`` = effect(ab) − effect(a) − effect(b)."""

    first: str
    second: str
    excess: float
    noise: Interval | None


@dataclass(frozen=True, slots=True)
class Attribution:
    """What was found. ``minimal``: sets that restore health, none of whose members can be left out. ``trials`` in the
    order of evaluation, the unchanged case first. ``refined``: for a factor with parts, the parts that are enough."""

    status: Status
    metric: str
    bound: float
    unchanged: Trial
    trials: tuple[Trial, ...]
    minimal: tuple[Names, ...] = ()
    refined: dict[str, Names] = field(default_factory=dict)
    interactions: tuple[Interaction, ...] = ()
    budget: int = 0

    def trial(self, *names: str) -> Trial | None:
        """The trial of exactly these factors, if it was evaluated."""
        return next((trial for trial in self.trials if trial.factors == frozenset(names)), None)

    @property
    def best(self) -> Trial:
        """The finite trial with the smallest value."""
        finite = [trial for trial in self.trials if trial.value is not None and not trial.num_nonfinite]
        return min(finite or [self.unchanged], key=lambda trial: trial.value if trial.value is not None else np.inf)


class SearchError(ValueError):
    """A search that can't be made as it was asked for; the text says what would do."""


class _BudgetSpent(Exception):
    """The next evaluation would be one too many."""


def attribute(
    evaluate: Evaluate,
    factors: Seq[Factor],
    bound: float,
    budget: int = DEFAULT_BUDGET,
    *,
    metric: str = "abs_diff/mean",
    full: bool = False,
    seed: int = 0,
) -> Attribution:
    """Find which factors restore an agreement that fails ``bound``, in at most ``budget`` calls of ``evaluate``.

    ``evaluate`` gets the names of the changed factors. ``full`` evaluates every subset instead of searching. Raises
    SearchError for doubled names, a budget below 2, or a full factorial that the budget does not cover.
    """
    names = [factor.name for factor in [*factors, *(part for factor in factors for part in factor.parts)]]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise SearchError(f"two factors share a name: {', '.join(doubled)}")
    if budget < 2:
        raise SearchError(f"a budget of {budget} runs can't compare anything; give at least 2")
    if full and 2 ** len(factors) > budget:
        raise SearchError(
            f"all subsets of {len(factors)} factors are {2 ** len(factors)} runs, the budget is {budget}: raise it, "
            "name fewer factors, or let it search"
        )
    return _Search(evaluate, factors, bound, budget, metric, seed).run(full)


class _Search:
    def __init__(
        self, evaluate: Evaluate, factors: Seq[Factor], bound: float, budget: int, metric: str, seed: int
    ) -> None:
        self.evaluate, self.factors, self.bound, self.budget = evaluate, factors, bound, budget
        self.metric, self.seed = metric, seed
        self.scores: dict[Names, Scores] = {}
        self.trials: dict[Names, Trial] = {}
        self.minimal: list[Names] = []
        self.refined: dict[str, Names] = {}
        self.decided = False

    def run(self, full: bool) -> Attribution:
        names = [factor.name for factor in self.factors]
        try:
            if not self.healthy(frozenset()):
                self.search_all(names) if full else self.search(names)
                self.decided = True
                self.refine()
                self.fill_lattice()
                self.singles(names)
        except _BudgetSpent:
            pass  # what was found until then is the result; ``decided`` says whether the search itself was over
        status: Status = "explained" if self.minimal else "unexplained" if self.decided else "undecided"
        if self.healthy(frozenset()):
            status = "healthy"
        return Attribution(
            status=status,
            metric=self.metric,
            bound=self.bound,
            unchanged=self.trials[frozenset()],
            trials=tuple(self.trials.values()),
            minimal=tuple(self.minimal),
            refined=self.refined,
            interactions=self.interactions(),
            budget=self.budget,
        )

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def healthy(self, names: Names) -> bool:
        """Within the bound; of changed factors, also by more than chance: a value that lies just above the bound would
        be brought below it by anything."""
        trial = self.trial(names)
        if names:
            return trial.judgement == "restores"
        return trial.value is not None and trial.value <= self.bound and not trial.num_nonfinite

    def trial(self, names: Names) -> Trial:
        if names not in self.trials:
            if len(self.trials) >= self.budget:
                raise _BudgetSpent
            self.scores[names] = self.evaluate(names)
            self.trials[names] = self._judged(names)
        return self.trials[names]

    def _judged(self, names: Names) -> Trial:
        scores, before = self.scores[names], self.scores[frozenset()]
        value, base = self._value(scores), self._value(before)
        effect = noise = price = None
        if value is not None and base is not None and names:
            effect = base - value
            if len(scores.differences) > 1:
                draws = resampled(self.metric, [before.differences, scores.differences], self.seed)
                noise = interval(draws[0] - draws[1])
        now, then = scores.tokens_per_s, before.tokens_per_s
        if names and now is not None and then is not None:
            price = 1 - now / then
        judgement = self._judgement(names, scores, value, base, effect, noise)
        return Trial(names, value, scores.num_nonfinite, effect, noise, judgement, now, price, scores.refused)

    def _judgement(
        self,
        names: Names,
        scores: Scores,
        value: float | None,
        base: float | None,
        effect: float | None,
        noise: Interval | None,
    ) -> Judgement:
        if scores.refused:
            return "refused"
        if not names or value is None:
            return "unknown"
        fewer = scores.num_nonfinite - self.scores[frozenset()].num_nonfinite
        within = value <= self.bound and not scores.num_nonfinite
        if fewer:
            return "restores" if within else "improves" if fewer < 0 else "worsens"
        if effect is None or base is None:
            return "restores" if within else "unknown"
        least = MIN_SHARE * base
        if within and effect >= least and (noise is None or noise.low > -least):
            # Its interval may begin at 0: a fault in one rollout is absent from a third of the draws of eight.
            return "restores"
        if abs(effect) < least or (noise is not None and noise.holds_zero):
            return "noise"
        return "improves" if effect > 0 else "worsens"

    def _value(self, scores: Scores) -> float | None:
        every = np.concatenate(scores.differences) if scores.differences else np.empty(0)
        return metric_value(self.metric, every) if len(every) else None

    # --- search -------------------------------------------------------------------------------------------------------

    def search_all(self, names: list[str]) -> None:
        """Every subset, smallest first."""
        for size in range(1, len(names) + 1):
            for chosen in map(frozenset, combinations(names, size)):
                if self.healthy(chosen) and not any(known <= chosen for known in self.minimal):
                    self.minimal.append(chosen)

    def search(self, names: list[str]) -> None:
        """Singles where the budget has room for them and a joint run; then joint sets, reduced by ddmin."""
        if self.budget >= len(names) + 2:
            self.singles(names)
            self.minimal = [frozenset({name}) for name in names if self.healthy(frozenset({name}))]
        for chosen in self.joint_sets(names):
            if self.minimal:
                return
            if self.healthy(chosen):
                self.minimal = [self.ddmin(sorted(chosen, key=names.index), frozenset())]

    def singles(self, names: Iterable[str]) -> None:
        for name in names:
            self.trial(frozenset({name}))

    def joint_sets(self, names: list[str]) -> Iterable[Names]:
        """Sets that might restore health together, likeliest first; known ones are skipped by the memory."""
        judged = {name: self.trials[one].judgement for name in names if (one := frozenset({name})) in self.trials}
        helpful = [name for name in names if judged.get(name) == "improves"]
        harmless = [name for name in names if judged.get(name) not in ("worsens", "refused")]
        yield from dict.fromkeys(frozenset(chosen) for chosen in (helpful, harmless, names) if len(chosen) > 1)
        acting = {name for name, judgement in judged.items() if judgement in ("improves", "worsens")}
        # A pair none of whose members does anything alone is not worth a run.
        yield from (frozenset(pair) for pair in combinations(names, 2) if acting & set(pair))

    def ddmin(self, items: list[str], fixed: Names) -> Names:
        """The smallest part of ``items`` that stays healthy together with ``fixed``; ``items`` themselves are."""
        parts = 2
        while len(items) > 1:
            size = -(-len(items) // parts)
            chunks = [items[start : start + size] for start in range(0, len(items), size)]
            rests = [[item for item in items if item not in chunk] for chunk in chunks] if len(chunks) > 2 else []
            smaller = next((c for c in [*chunks, *rests] if self.healthy(fixed | frozenset(c))), None)
            if smaller is not None:
                parts = 2 if smaller in chunks else max(parts - 1, 2)
                items = smaller
            elif size == 1:
                break
            else:
                parts = min(parts * 2, len(items))
        return fixed | frozenset(items)

    def refine(self) -> None:
        """For a found factor that has parts: which of them are enough, the rest of its set unchanged."""
        by_name = {factor.name: factor for factor in self.factors}
        for chosen in self.minimal:
            for name in sorted(chosen):
                parts = [part.name for part in by_name[name].parts]
                fixed = chosen - {name}
                if parts and name not in self.refined and self.healthy(fixed | frozenset(parts)):
                    self.refined[name] = self.ddmin(parts, fixed) - fixed

    def fill_lattice(self) -> None:
        """All subsets of the minimal sets, so that the report can say what each member does without the others."""
        for chosen in self.minimal:
            if len(chosen) <= MAX_LATTICE:
                for size in range(1, len(chosen)):
                    for part in combinations(sorted(chosen), size):
                        self.trial(frozenset(part))

    def interactions(self) -> tuple[Interaction, ...]:
        found = []
        parts = {part.name for factor in self.factors for part in factor.parts}
        pairs = [names for names in self.trials if len(names) == 2 and not names & parts]
        for chosen in pairs:
            first, second = sorted(chosen)
            cases = [frozenset(), frozenset({first}), frozenset({second}), chosen]
            if any(case not in self.trials or self.trials[case].value is None for case in cases):
                continue
            values = [self.trials[case].value or 0.0 for case in cases]
            noise = None
            if len(self.scores[chosen].differences) > 1:
                draws = resampled(self.metric, [self.scores[case].differences for case in cases], self.seed)
                noise = interval(draws[1] + draws[2] - draws[0] - draws[3])
            found.append(Interaction(first, second, values[1] + values[2] - values[0] - values[3], noise))
        return tuple(found)


def sentence(result: Attribution) -> str:
    """The finding in one or two sentences with its numbers."""
    start, bound = _number(result.unchanged.value), f"bound {result.bound:g}"
    if result.unchanged.num_nonfinite:
        start += f" with {result.unchanged.num_nonfinite} tokens not finite"
    if result.status == "healthy":
        return f"{result.metric} {start} is within the {bound}: there is nothing to explain"
    if result.status == "undecided":
        known = [trial.factors for trial in result.trials if trial.judgement == "restores"]
        least = f"; {' + '.join(sorted(min(known, key=len)))} restore it, fewer may do" if known else ""
        return f"undecided after {len(result.trials)} runs, the whole budget: {result.metric} {start}, {bound}{least}"
    if result.status == "unexplained":
        best = result.best
        reached = "none of them lowers it beyond noise"
        if best.factors and best.judgement in ("improves", "restores"):
            reached = f"at best {_number(best.value)} ({' + '.join(sorted(best.factors))})"
        return (
            f"unexplained: {result.metric} {start} is above the {bound} and no set of the named factors restores it, "
            f"{reached}; the cause, or a part of it, is outside of them"
        )
    return "; ".join(_found(result, chosen, start) for chosen in result.minimal) + f" ({result.metric}, {bound})"


def _found(result: Attribution, chosen: Names, start: str) -> str:
    names = sorted(chosen)
    joint = result.trial(*names)
    together = _number(joint.value) if joint is not None else "healthy"
    refined = [sorted(result.refined[name]) for name in names if name in result.refined]
    parts = [f", and of it {' + '.join(found)} is enough" for found in refined]
    if len(names) == 1:
        return f"{names[0]} restores it: {start} → {together}{''.join(parts)}"
    alone = [(name, result.trial(name)) for name in names]
    shown = ", ".join(f"{_number(trial.value)} with {name}" for name, trial in alone if trial is not None)
    word = "neither" if len(names) == 2 else "none"
    return f"{word} alone suffices: {start} → {shown} alone, {together} together{''.join(parts)}"


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4g}"
