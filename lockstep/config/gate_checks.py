"""Which of a gate's bounds belong to a run, and the rules between the gate's settings.

A bound is of one kind of hardware, one pair of dtypes and one quantisation. What was measured in bfloat16 says nothing
about float32, so a run for which no bound was given is refused, not judged by another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lockstep.config.algorithm_checks import inert, rule
from lockstep.config.errors import ConfigError, Violation
from lockstep.config.schema import BoundConfig, CorrectionConfig, RunConfig

HARDWARE = ("cpu", "cuda")


def dtype_of(config: RunConfig) -> str:
    """The dtypes of trainer and engine as ``BoundConfig.dtype`` writes them: one word where both are alike."""
    trainer, rollout = config.trainer.dtype, config.rollout.dtype
    return trainer if trainer == rollout else f"{trainer}/{rollout}"


def fitting_bounds(config: RunConfig, hardware: str) -> tuple[BoundConfig, ...]:
    """The bounds for this run on that kind of device, in the order of the configuration; empty: none was given."""
    dtype, quantisation = dtype_of(config), config.rollout.quantisation
    return tuple(
        bound
        for bound in config.gate.bounds
        if bound.hardware in ("any", hardware) and bound.dtype in ("any", dtype) and bound.quantisation == quantisation
    )


def bounds_for(config: RunConfig, hardware: str) -> tuple[BoundConfig, ...]:
    """``fitting_bounds`` of the device that was chosen. Raises ``ConfigError`` where there is none."""
    bounds = fitting_bounds(config, hardware)
    if not bounds:
        raise ConfigError("gate", [_no_bound(config, hardware)])
    return bounds


def _no_bound(config: RunConfig, hardware: str) -> Violation:
    given = ", ".join(
        f"{b.metric} on {b.hardware} in {b.dtype}{_quantised(b.quantisation)}" for b in config.gate.bounds
    )
    return Violation(
        "gate.bounds",
        f"has no bound for {hardware} in {dtype_of(config)} (trainer/engine){_quantised(config.rollout.quantisation)}; "
        f"given: {given or 'none'}",
        'add one with its evidence: run with a generous bound and gate.action = "warn" and see what is normal there',
        ("device", "trainer.dtype", "rollout.dtype", "rollout.quantisation"),
    )


def _quantised(scheme: str) -> str:
    return "" if scheme == "none" else f" quantised {scheme}"


@rule
def a_bound_fits_the_run(config: RunConfig) -> Iterator[Violation]:
    """There is a bound for the run's dtypes on the device it names (``auto``: on some device), with its evidence."""
    kinds = HARDWARE if config.device == "auto" else (config.device,)
    if not any(fitting_bounds(config, kind) for kind in kinds):
        yield _no_bound(config, " or ".join(kinds))
    for bound in config.gate.bounds:
        if not bound.evidence.strip():
            message = f"the bound on {bound.metric} has no evidence"
            yield Violation("gate.bounds", message, "say what was measured, or who published it")


@rule
def bounds_do_not_overlap(config: RunConfig) -> Iterator[Violation]:
    """For one metric at most one bound fits a device: with two it would be open which of them is meant."""
    for kind in HARDWARE:
        counts = Counter(bound.metric for bound in fitting_bounds(config, kind))
        for metric in (metric for metric, count in counts.items() if count > 1):
            yield Violation(
                "gate.bounds",
                f"has {counts[metric]} bounds on {metric} for {kind} in {dtype_of(config)}"
                f"{_quantised(config.rollout.quantisation)}",
                "keep one, or tell them apart by hardware, dtype and quantisation",
                ("trainer.dtype", "rollout.dtype", "rollout.quantisation"),
            )
            return


@rule
def gate_correction_goes_with_correct(config: RunConfig) -> Iterator[Violation]:
    """``action = "correct"`` switches ``gate.correction`` on: it must correct something, and differ from what is on
    from the start. ``bypass`` is no correction: it moves the anchor of the ratio."""
    gate, key = config.gate, "gate.correction"
    corrects = gate.correction.weight != "off" or bool(gate.correction.reject)
    if gate.action != "correct":
        if gate.correction != CorrectionConfig():
            message = f"has no effect with action {gate.action}"
            yield Violation(key, message, 'remove it, or set gate.action = "correct"', ("gate.action",))
    elif not corrects:
        yield Violation(
            key,
            "action correct has nothing to switch on",
            'set gate.correction.weight = "tis", or gate.correction.reject',
            ("gate.action",),
        )
    elif gate.correction == config.algorithm.corrections:
        message = "equals algorithm.corrections: switching it on would change nothing"
        yield Violation(key, message, "use another one, or action stop", ("gate.action",))
    if gate.correction.bypass:
        message = "is no correction: it takes the engine's log-probs as the ratio's anchor"
        yield Violation(f"{key}.bypass", message, "set algorithm.corrections.bypass, or leave it off", ("gate.action",))


@rule
def hysteresis_can_fail(config: RunConfig) -> Iterator[Violation]:
    """The window holds the breaches that fail; a drift factor needs a baseline."""
    gate = config.gate
    if gate.breaches > gate.window:
        message = f"{gate.breaches} steps can't lie in a window of {gate.window}"
        yield Violation("gate.breaches", message, f"use {gate.window} or less, or a wider window", ("gate.window",))
    if gate.baseline_steps == 0:
        yield from inert(gate, "gate", "drift_factor", "without a baseline", ("gate.baseline_steps",))
