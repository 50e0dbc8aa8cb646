"""The sections of the gate: its bounds, its hysteresis, and the corrections that it may switch on.

``schema.py`` puts them into the whole configuration; corrections are also a section of the algorithm.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lockstep.config.section import Quantisation, Section


class CorrectionConfig(Section):
    """Corrections of mismatched or stale samples: at most one weight, any rejections."""

    weight: Literal["off", "tis", "tis_seq"] = Field(default="off", description="tis: by token; tis_seq: by sequence.")
    weight_low: float = Field(default=0.0, ge=0, description="Weights are clipped to [low, high].")
    weight_high: float = Field(default=2.0, gt=0, description="See weight_low.")
    reject: tuple[Literal["icepop", "mis", "geometric", "veto"], ...] = Field(
        default=(), description="icepop and veto look at tokens, mis and geometric at sequences."
    )
    icepop_low: float = Field(default=0.5, description="Token ratios outside [low, high] are dropped.")
    icepop_high: float = Field(default=5.0, description="See icepop_low.")
    mis_low: float = Field(
        default=0.5, description="Sequences with a product of ratios outside [low, high] are dropped."
    )
    mis_high: float = Field(default=2.0, description="See mis_low.")
    geometric_low: float = Field(default=0.99, description="The same for the geometric mean of the ratios.")
    geometric_high: float = Field(default=1.01, description="See geometric_low.")
    veto: float = Field(default=1e-4, description="A token with a smaller ratio drops its sequence.")
    denominator: Literal["kept", "fixed"] = Field(
        default="kept",
        description="Whether the loss is divided by what is left, or by what was there before rejections.",
    )
    bypass: bool = Field(
        default=False, description="Use the engine's log-probs as the ratio's anchor; excludes weights."
    )


class BoundConfig(Section):
    """One bound on one metric, where it holds, and why: an item of ``[[gate.bounds]]``."""

    metric: Literal[
        "abs_diff/mean",
        "abs_diff/rollout_mean",
        "abs_diff/p50",
        "abs_diff/p99",
        "abs_diff/max",
        "k3",
        "mult_error",
        "prob_diff/mean",
        "log_ppl_abs_diff",
    ] = Field(default="abs_diff/mean", description="What is held against the bound; docs/agreement.md defines each.")
    bound: float = Field(gt=0, description="Largest value that passes.")
    hardware: Literal["any", "cpu", "cuda"] = Field(
        default="any", description="Kind of device that the run is on where this bound is used."
    )
    dtype: Literal["any", "bfloat16", "float32", "bfloat16/float32", "float32/bfloat16"] = Field(
        default="any", description="trainer.dtype/rollout.dtype where this bound is used; one word: both sides alike."
    )
    quantisation: Quantisation = Field(
        default="none",
        description="rollout.quantisation where this bound is used: what was measured on unquantised weights says "
        "nothing about quantised ones.",
    )
    evidence: str = Field(description="Where the bound comes from: what was measured, or who published it.")
    shown: bool = Field(
        default=False,
        description="Whether a healthy run below it and a planted fault above it were seen there; a verdict says "
        "when they were not.",
    )


class GateConfig(Section):
    """The bounds on train–rollout agreement, judged at every step before the optimizer moves."""

    bounds: tuple[BoundConfig, ...] = Field(
        description="At most one per metric fits a run's hardware and dtypes; all that fit are judged."
    )
    action: Literal["stop", "warn", "correct"] = Field(
        default="stop",
        description="On a failure: stop before the optimizer moves; warn and go on; or correct: use gate.correction "
        "from the next step on. A value that is not finite stops always.",
    )
    correction: CorrectionConfig = Field(
        default=CorrectionConfig(),
        description="With action correct: replaces algorithm.corrections from the step after a failure.",
    )
    breaches: int = Field(
        default=2, ge=1, description="Steps above a bound, this one and others of the last window, that are a failure."
    )
    window: int = Field(default=8, ge=1, description="Judged steps that breaches and drift look back on.")
    far_factor: float = Field(
        default=2.0, ge=1, description="A value above this many times the bound is a failure by itself."
    )
    min_tokens: int = Field(
        default=32, ge=1, description="Tokens that a step needs for far_factor; with fewer it is one breach."
    )
    baseline_steps: int = Field(
        default=8,
        ge=0,
        description="First judged steps whose median is the run's own baseline; 0 steps or "
        "a median of 0: no drift check.",
    )
    drift_factor: float = Field(
        default=4.0, gt=1, description="A median of the last window above this many times the baseline is a failure."
    )
    unjudged_patience: int = Field(
        default=3, ge=1, description="Steps in a row without an eligible token that stop the run."
    )
