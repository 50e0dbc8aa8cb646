"""The claim ``behaves``: after a refit the engine's log-probs on probes are the reference's, by prefill and by decode.

::

    before the refit    engine ─ prefill ─▶ π_old
    after the commit    engine ─ prefill, decode ─▶ π_new ── difference ──▶ reference (the trainer, or another engine)
                        engine ─ each probe alone ─▶ π_new'
    power = mean |log π_new − log π_old|        noise = mean |log π_new − log π_new'|

A small difference proves nothing where the weights hardly moved: a stale engine would show the same. So the claim is
*not checked (no power)* unless the power is at least ten times the noise. A bound that the power does not exceed is one
that an engine passes which received nothing: there the difference must stay below a tenth of the power instead. The
bound is the recipe's, or three times the noise where that is more: random tokens are improbable, and their log-probs
round coarser than those of the sampled tokens that recipes judge. It is never more than ten times the recipe's: an
engine whose answers depend on what else is in the batch must not widen its own bound without end.

Bytes can't replace this check: a shuffle that is applied twice, a stale copy of a derived tensor or a cache of the old
version keep every parameter as it was sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from lockstep.interfaces import LogProbs
from lockstep.records import Claim, Sequence
from lockstep.refit.probes import Probes, Score

Path = Literal["prefill", "decode"]
EngineScore = Callable[[Seq[Sequence], Path], Mapping[str, LogProbs]]

PATHS: tuple[Path, ...] = ("prefill", "decode")
MIN_POWER_OVER_NOISE = 10.0
BOUND_OVER_NOISE = 3.0
MOST_OVER_BOUND = 10.0
"""How far the engine's own noise may widen the bound that was given."""
POWER_OVER_DIFFERENCE = 10.0
"""What stands for a bound where a stale engine would pass the given one."""

_DECODING = (
    "; decoding alone is off: in one forward the weights answer right, so it is the engine's cache, which is not exact "
    "for this architecture or in this dtype, or what its decode path keeps of older weights. Use another architecture, "
    "dtype or engine, or raise the bound if rounding explains it"
)


def fitting_bound(bound: float, power: float | None) -> float:
    """``bound``, or a tenth of the power where that does not exceed it: a stale engine differs by about the power."""
    return bound if power is None or power > bound else power / POWER_OVER_DIFFERENCE


@dataclass(frozen=True, slots=True)
class Measured:
    """What the probes showed: mean and largest |log π_engine − log π_reference| by path, power and noise (nats), all
    over ``num_tokens`` tokens. ``power`` None: the engine could not be scored before the refit. ``bound`` is what the
    means were held to."""

    prefill_mean: float
    prefill_max: float
    decode_mean: float
    decode_max: float
    power: float | None
    noise: float
    bound: float
    num_tokens: int
    num_nonfinite: int
    coverage: float
    coverage_text: str
    seconds: float

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON; a number that is not finite is its text."""
        plain = asdict(self)
        return {k: str(v) if isinstance(v, float) and not np.isfinite(v) else v for k, v in plain.items()}


class Behaviour:
    """Measures one engine against a reference on fixed probes: ``before()``, the refit, then a call gives the claim.

    ``engine(sequences, path)`` and ``reference(sequences)`` score at the same temperature. ``bound`` is on the mean
    difference of log-probs; ``bound_of`` says whose it is.
    """

    def __init__(
        self, probes: Probes, engine: EngineScore, reference: Score, *, bound: float, bound_of: str = ""
    ) -> None:
        self.probes, self.bound, self.bound_of = probes, bound, bound_of
        self.measured: Measured | None = None
        self._engine, self._reference = engine, reference
        self._old: np.ndarray | None = None
        self._no_old = "the engine was not scored before the refit"

    def before(self) -> None:
        """Score the engine as it is, for the power. An engine that can't be scored leaves the power unknown."""
        try:
            old = self._flat(self._engine(self.probes.sequences, "prefill"))
            if not np.isfinite(old).all():
                raise ValueError(f"{int((~np.isfinite(old)).sum())} of {len(old)} log-probs were not finite")
            self._old = old
        except (RuntimeError, ValueError) as error:
            self._old, self._no_old = None, f"the engine could not be scored before the refit: {error}"

    def __call__(self) -> Claim:
        """Score both sides and judge; numbers are kept in ``measured``."""
        start = time.perf_counter()
        sequences = self.probes.sequences
        new = self._flat(self._engine(sequences, "prefill"))
        decoded = self._flat(self._engine(sequences, "decode"))
        wanted = self._flat(self._reference(sequences))
        alone: dict[str, LogProbs] = {}
        for sequence in sequences:
            alone.update(self._engine([sequence], "prefill"))
        single = self._flat(alone)
        finite = np.isfinite(new) & np.isfinite(decoded) & np.isfinite(wanted) & np.isfinite(single)
        prefill, decode = np.abs(new - wanted), np.abs(decoded - wanted)
        noise = float(np.abs(new - single).mean())
        self.measured = Measured(
            prefill_mean=float(prefill.mean()),
            prefill_max=float(prefill.max()),
            decode_mean=float(decode.mean()),
            decode_max=float(decode.max()),
            power=None if self._old is None else float(np.abs(new - self._old).mean()),
            noise=noise,
            bound=self._widened(noise),
            num_tokens=len(new),
            num_nonfinite=int((~finite).sum()),
            coverage=self.probes.coverage.share,
            coverage_text=self.probes.coverage.text(),
            seconds=time.perf_counter() - start,
        )
        self._old = None
        return self._judged(self.measured)

    def _judged(self, m: Measured) -> Claim:
        if m.num_nonfinite:
            return Claim("behaves", "failed", f"{m.num_nonfinite} of {m.num_tokens} log-probs are not finite")
        shown = (
            f"prefill {m.prefill_mean:.2g}, decode {m.decode_mean:.2g} (largest {max(m.prefill_max, m.decode_max):.2g})"
            f" against a bound of {m.bound:.2g}{self._whose(m)} on {m.num_tokens} tokens"
            f" through {m.coverage_text}"
        )
        if max(m.prefill_mean, m.decode_mean) > m.bound:
            power = "unknown" if m.power is None else f"{m.power:.2g}"
            hint = _DECODING if m.prefill_mean <= m.bound else ""
            return Claim("behaves", "failed", f"{shown}; power {power}, noise {m.noise:.2g}{hint}")
        if m.power is None:
            return Claim("behaves", "not checked", f"no power: {self._no_old}; {shown}")
        ratio = f"power {m.power:.2g}, noise {m.noise:.2g}"
        if m.power == 0:
            ratio += " (the very answers of before: the same weights, or none that arrived)"
        if m.power <= MIN_POWER_OVER_NOISE * m.noise:
            needed = MIN_POWER_OVER_NOISE * m.noise
            return Claim("behaves", "not checked", f"no power: {ratio}, more than {needed:.2g} is needed; {shown}")
        fitting = fitting_bound(m.bound, m.power)
        if max(m.prefill_mean, m.decode_mean) > fitting:
            return Claim(
                "behaves",
                "not checked",
                f"no power: {ratio}, more than {m.bound:.2g} is needed, or a difference of {fitting:.2g}; {shown}",
            )
        tighter = f", which a stale engine would pass, and of {fitting:.2g}" if fitting < m.bound else ""
        return Claim("behaves", "held", f"{shown}{tighter}; {ratio}")

    def _widened(self, noise: float) -> float:
        if not np.isfinite(noise):
            return self.bound
        return max(self.bound, min(BOUND_OVER_NOISE * noise, MOST_OVER_BOUND * self.bound))

    def _whose(self, m: Measured) -> str:
        if m.bound > self.bound:
            times = "three times the noise" if m.bound < MOST_OVER_BOUND * self.bound else "ten times what was given"
            return f" ({times}; {self.bound_of or 'given'}: {self.bound:g})"
        return f" ({self.bound_of})" if self.bound_of else ""

    def _flat(self, scored: Mapping[str, LogProbs]) -> np.ndarray:
        """Log-probs of all counted tokens, one after the other, float64."""
        pieces = [scored[s.sequence_id].logprobs[s.loss_mask] for s in self.probes.sequences]
        return np.concatenate(pieces).astype(np.float64)
