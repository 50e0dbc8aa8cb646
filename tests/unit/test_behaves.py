"""The judgement of ``behaves`` on engines made of numbers: what noise, NaN and a loose bound may hide."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from lockstep.interfaces import LogProbs
from lockstep.records import Claim, Sequence
from lockstep.refit.behaves import Behaviour, fitting_bound
from lockstep.refit.probes import Coverage, Probes

NUM_PROBES, LENGTH = 4, 9


def probes() -> Probes:
    zeros = np.zeros(LENGTH, np.int32)
    made = [
        Sequence(f"p{i}", zeros + i, np.arange(LENGTH) > 0, np.zeros(LENGTH, np.float32), zeros, zeros)
        for i in range(NUM_PROBES)
    ]
    return Probes(tuple(made), Coverage(0, (), LENGTH, 0))


def constant(value: float, sequences: Seq[Sequence]) -> dict[str, LogProbs]:
    return {s.sequence_id: LogProbs(np.full(LENGTH, value, np.float32), 0) for s in sequences}


def judged(*, old: float, new: float, wanted: float, alone: float | None = None, bound: float) -> Claim:
    """The claim about an engine that answers ``old`` before the refit, ``new`` after it, and ``alone`` where a probe is
    scored by itself."""
    answer = {"now": old}

    def engine(sequences: Seq[Sequence], _path: str) -> dict[str, LogProbs]:
        single = alone is not None and len(sequences) == 1
        return constant(alone if single else answer["now"], sequences)  # pyright: ignore[reportArgumentType]

    check = Behaviour(probes(), engine, lambda sequences: constant(wanted, sequences), bound=bound)
    check.before()
    answer["now"] = new
    return check()


def test_a_right_engine_with_power_holds() -> None:
    assert judged(old=-1, new=-2, wanted=-2, bound=1e-5).status == "held"


def test_noise_that_is_not_finite_fails() -> None:
    """Compared with anything, NaN is not larger: it passed for no noise at all."""
    claim = judged(old=-1, new=-2, wanted=-2, alone=float("nan"), bound=1e-5)
    assert claim.status == "failed"
    assert "not finite" in claim.detail


def test_an_engine_that_was_not_finite_before_gives_no_power() -> None:
    claim = judged(old=float("nan"), new=-2, wanted=-2, bound=1e-5)
    assert claim.status == "not checked"
    assert "not finite" in claim.detail


def test_an_engines_own_noise_does_not_widen_its_bound_without_end() -> None:
    """0.05 off the reference, and off itself where probes come alone: a fault of batching, not rounding."""
    claim = judged(old=-3, new=-2, wanted=-2.05, alone=-2.05, bound=1e-5)
    assert claim.status == "failed"
    assert "ten times what was given" in claim.detail
    assert judged(old=-3, new=-2, wanted=-2.05, alone=-2.02, bound=0.04).status == "held", "rounding of bfloat16"


def test_a_stale_engine_never_passes_by_its_noise() -> None:
    for noise in (0.0, 0.001, 0.1):
        claim = judged(old=-2, new=-2, wanted=-2, alone=-2 - noise, bound=0.1)
        assert claim.status == "not checked", claim.detail
    assert judged(old=-2, new=-2, wanted=-3, bound=0.1).status == "failed"


def test_a_bound_above_the_power_gives_way_to_a_tenth_of_the_power() -> None:
    held = judged(old=-2, new=-2.05, wanted=-2.051, bound=0.1)
    assert held.status == "held"
    assert "0.005" in held.detail
    loose = judged(old=-2, new=-2.05, wanted=-2.06, bound=0.1)
    assert loose.status == "not checked"
    assert "no power" in loose.detail
    assert fitting_bound(0.1, 0.2) == 0.1
    assert fitting_bound(0.1, None) == 0.1
