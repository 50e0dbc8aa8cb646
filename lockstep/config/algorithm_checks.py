"""Rules between the settings of sampling, advantages, losses and corrections, and what all rules share.

A setting without effect is an error, not a remark: a value that is accepted and ignored is how runs go wrong
silently. "Set" means here: differs from the default. What one field alone may be is in the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lockstep.config.errors import Violation
from lockstep.config.schema import CorrectionConfig, RunConfig, Section
from lockstep.config.toml_text import format_value

Rule = Callable[[RunConfig], Iterator[Violation]]

RULES: list[Rule] = []
"""All rules, in the order in which they report."""

GROUP_BASELINES = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
"""Advantages that compare a sample with the others of its group."""


def rule(function: Rule) -> Rule:
    """Add a rule to ``RULES``."""
    RULES.append(function)
    return function


def inert(section: Section, prefix: str, names: str, because: str, also: tuple[str, ...]) -> Iterator[Violation]:
    """A violation for each of ``names`` that is set although nothing reads it."""
    for name in names.split():
        default: Any = type(section).model_fields[name].get_default(call_default_factory=True)
        if getattr(section, name) != default:
            shown = "none" if default is None else format_value(default)
            way_out = f"leave {prefix}.{name} at its default ({shown}), or change {' or '.join(also)}"
            yield Violation(f"{prefix}.{name}", f"has no effect {because}", way_out, also)


# --- advantages and groups --------------------------------------------------------------------------------------------


@rule
def group_baseline_needs_a_group(config: RunConfig) -> Iterator[Violation]:
    """A baseline over the group needs at least two samples: with one, every advantage is 0 and nothing is learned."""
    a = config.algorithm
    if a.advantage in GROUP_BASELINES and a.group_size < 2:
        message = f"a group of {a.group_size} has no baseline: {a.advantage} compares samples of one prompt"
        yield Violation(
            "algorithm.group_size",
            message,
            "set algorithm.group_size to 2 or more, or use reinforce_pp",
            ("algorithm.advantage",),
        )


@rule
def gamma_belongs_to_reinforce_pp(config: RunConfig) -> Iterator[Violation]:
    """Only reinforce_pp has a return-to-go that gamma could discount."""
    if config.algorithm.advantage != "reinforce_pp":
        yield from inert(
            config.algorithm,
            "algorithm",
            "gamma",
            f"with advantage {config.algorithm.advantage}",
            ("algorithm.advantage",),
        )


@rule
def clipping_needs_a_second_step(config: RunConfig) -> Iterator[Violation]:
    """With one optimizer step a batch the old policy is the live one: the ratio is exactly 1 and nothing is clipped."""
    a = config.algorithm
    if a.optimizer_steps_per_batch == 1 and not a.corrections.bypass:
        because = "with one optimizer step a batch: the ratio is exactly 1"
        also = ("algorithm.optimizer_steps_per_batch", "algorithm.corrections.bypass")
        yield from inert(a, "algorithm", "clip_low clip_high dual_clip", because, also)


@rule
def steps_divide_the_batch(config: RunConfig) -> Iterator[Violation]:
    """A rollout batch is split into whole, equal optimizer steps of whole groups; found here, not minutes into it."""
    a = config.algorithm
    if a.num_prompts % a.optimizer_steps_per_batch:
        message = f"{a.num_prompts} prompts can't be split into {a.optimizer_steps_per_batch} equal optimizer steps"
        divisors = ", ".join(str(n) for n in range(1, a.num_prompts + 1) if a.num_prompts % n == 0)
        yield Violation(
            "algorithm.optimizer_steps_per_batch",
            message,
            f"use one of {divisors}, or another num_prompts",
            ("algorithm.num_prompts",),
        )


@rule
def distillation_has_one_teacher(config: RunConfig) -> Iterator[Violation]:
    """On-policy distillation needs a teacher, and nothing else uses one."""
    distill = config.algorithm.advantage == "distill"
    if distill and config.teacher is None:
        yield Violation(
            "teacher",
            "advantage distill needs a teacher",
            "add a [teacher] section (as [model])",
            ("algorithm.advantage",),
        )
    if config.teacher is not None and not distill:
        yield Violation(
            "teacher",
            f"has no effect with advantage {config.algorithm.advantage}",
            'remove [teacher], or set algorithm.advantage = "distill"',
            ("algorithm.advantage",),
        )


@rule
def distillation_ignores_rewards(config: RunConfig) -> Iterator[Violation]:
    """Distillation learns from the teacher's log-probs: what shapes or filters rewards would be inert."""
    a = config.algorithm
    if a.advantage != "distill":
        return
    wrong = {
        "algorithm.dynamic_sampling.enabled": a.dynamic_sampling.enabled,
        "algorithm.overlong.factor": a.overlong.factor > 0,
        "algorithm.truncated": a.truncated == "penalise",
        "algorithm.kl.place": a.kl.place == "reward",
    }
    for key in (key for key, is_set in wrong.items() if is_set):
        yield Violation(
            key,
            "acts on rewards, which advantage distill does not read",
            "switch it off, or use another advantage",
            ("algorithm.advantage",),
        )
    yield from inert(a, "algorithm", "abstain_patience", "with advantage distill", ("algorithm.advantage",))


# --- sampling ---------------------------------------------------------------------------------------------------------


@rule
def training_samples_the_whole_distribution(config: RunConfig) -> Iterator[Violation]:
    """Truncated sampling is refused: the engine renormalises over the kept tokens, the trainer over all of them, so
    the ratio would be biased by the kept mass (and distillation compares whole distributions)."""
    r = config.rollout
    for name, is_set, off in (("top_k", r.top_k > 0, 0), ("top_p", r.top_p < 1, 1.0), ("min_p", r.min_p > 0, 0.0)):
        if is_set:
            yield Violation(
                f"rollout.{name}",
                "truncated sampling is refused for training: the log-probs of engine "
                "and trainer would be of different distributions",
                f"set rollout.{name} = {off}",
            )


@rule
def stop_strings_are_not_empty(config: RunConfig) -> Iterator[Violation]:
    """An empty stop string would end every completion at once."""
    if "" in config.rollout.stop_strings:
        yield Violation("rollout.stop_strings", "has an empty string, which is found everywhere", "remove it")


@rule
def dynamic_sampling_needs_groups(config: RunConfig) -> Iterator[Violation]:
    """With one sample a group's rewards are always all equal: every group would be dropped. Its limit needs it on."""
    a = config.algorithm
    if a.dynamic_sampling.enabled and a.group_size < 2:
        yield Violation(
            "algorithm.dynamic_sampling.enabled",
            "a group of 1 always has equal rewards and is dropped",
            "set algorithm.group_size to 2 or more",
            ("algorithm.group_size",),
        )
    if not a.dynamic_sampling.enabled:
        yield from inert(
            a.dynamic_sampling,
            "algorithm.dynamic_sampling",
            "max_refill_rounds",
            "with dynamic sampling off",
            ("algorithm.dynamic_sampling.enabled",),
        )


@rule
def truncation_penalty_goes_with_penalise(config: RunConfig) -> Iterator[Violation]:
    """``truncated = "penalise"`` subtracts ``truncated_penalty``: either alone does nothing."""
    a = config.algorithm
    if a.truncated == "penalise" and a.truncated_penalty == 0:
        yield Violation(
            "algorithm.truncated",
            "penalise subtracts truncated_penalty, which is 0",
            "set algorithm.truncated_penalty above 0",
            ("algorithm.truncated_penalty",),
        )
    if a.truncated != "penalise":
        yield from inert(a, "algorithm", "truncated_penalty", f"with truncated {a.truncated}", ("algorithm.truncated",))


@rule
def overlong_buffer_fits(config: RunConfig) -> Iterator[Violation]:
    """The soft overlong punishment needs a factor and a buffer, and the buffer lies inside ``max_new_tokens``, the
    one length limit of a completion."""
    o, limit = config.algorithm.overlong, config.rollout.max_new_tokens
    keys = ("algorithm.overlong.buffer_tokens", "algorithm.overlong.factor")
    if (o.factor > 0) != (o.buffer_tokens > 0):
        lacking, given = keys if o.factor > 0 else keys[::-1]
        yield Violation(
            given, f"has no effect while {lacking} is 0", f"set {lacking} above 0, or {given} to 0", (lacking,)
        )
    if o.buffer_tokens >= limit:
        yield Violation(
            keys[0],
            f"a buffer of {o.buffer_tokens} tokens does not fit into {limit} new tokens",
            f"use less than {limit}",
            ("rollout.max_new_tokens",),
        )


# --- loss -------------------------------------------------------------------------------------------------------------


@rule
def length_norm_goes_with_token_sum_norm(config: RunConfig) -> Iterator[Violation]:
    """``token_sum_norm`` divides by a configured constant; no other aggregation reads it."""
    a = config.algorithm
    if a.aggregation == "token_sum_norm" and a.length_norm is None:
        yield Violation(
            "algorithm.length_norm",
            "aggregation token_sum_norm divides by it, and it is not set",
            f"set it, for example to rollout.max_new_tokens ({config.rollout.max_new_tokens})",
            ("algorithm.aggregation",),
        )
    if a.aggregation != "token_sum_norm":
        yield from inert(a, "algorithm", "length_norm", f"with aggregation {a.aggregation}", ("algorithm.aggregation",))


@rule
def gspo_is_a_sequence_loss(config: RunConfig) -> Iterator[Violation]:
    """GSPO's ratio belongs to the sequence, so its loss is a mean over sequences of means over tokens."""
    a = config.algorithm
    if a.loss == "gspo" and a.aggregation != "seq_mean_token_mean":
        yield Violation(
            "algorithm.aggregation",
            f"loss gspo is not defined with aggregation {a.aggregation}",
            'set algorithm.aggregation = "seq_mean_token_mean"',
            ("algorithm.loss",),
        )


@rule
def dual_clip_belongs_to_ppo_clip(config: RunConfig) -> Iterator[Violation]:
    """Dual clip bounds ppo_clip's loss for negative advantages; the other losses have no such term."""
    if config.algorithm.loss != "ppo_clip":
        yield from inert(
            config.algorithm, "algorithm", "dual_clip", f"with loss {config.algorithm.loss}", ("algorithm.loss",)
        )


@rule
def clip_range_is_a_range(config: RunConfig) -> Iterator[Violation]:
    """The ratio is clipped to [1 − clip_low, 1 + clip_high], whose lower end is above 0. reinforce does not clip."""
    a = config.algorithm
    if a.clip_low >= 1:
        yield Violation("algorithm.clip_low", f"1 − {a.clip_low} is no lower bound of a ratio", "use less than 1")
    if a.loss == "reinforce":
        yield from inert(a, "algorithm", "clip_low clip_high", "with loss reinforce", ("algorithm.loss",))


@rule
def kl_is_on_or_off(config: RunConfig) -> Iterator[Violation]:
    """A KL has a place and a coefficient above 0, or neither; its estimator and a reference need it on."""
    kl, on = config.algorithm.kl, config.algorithm.kl.place != "off"
    place, coefficient = "algorithm.kl.place", "algorithm.kl.coefficient"
    if on and kl.coefficient == 0:
        yield Violation(
            place,
            f'"{kl.place}" with a coefficient of 0 does nothing',
            f'set {coefficient} above 0, or {place} = "off"',
            (coefficient,),
        )
    if not on:
        yield from inert(kl, "algorithm.kl", "coefficient estimator", "with the KL off", (place,))
        if config.reference is not None:
            yield Violation(
                "reference", "has no effect with the KL off", f"remove [reference], or set {place}", (place,)
            )


@rule
def kl_estimator_fits_its_place(config: RunConfig) -> Iterator[Violation]:
    """In the loss k1 is refused: its expected gradient is zero. In the reward only k1 is right: the estimate itself,
    not its gradient, is what counts there."""
    kl = config.algorithm.kl
    keys = ("algorithm.kl.estimator", ("algorithm.kl.place",))
    if kl.place == "loss" and kl.estimator == "k1":
        yield Violation(
            keys[0], "k1 in the loss has an expected gradient of zero", "use k2, k3 or kl_unbiased", keys[1]
        )
    if kl.place == "reward" and kl.estimator != "k1":
        yield Violation(keys[0], f"{kl.estimator} is made for the loss", 'set it to "k1"', keys[1])


# --- corrections ------------------------------------------------------------------------------------------------------


def _corrections(config: RunConfig) -> Iterator[tuple[CorrectionConfig, str]]:
    """Both places where corrections are configured: those of the run, and those that its gate may switch on."""
    yield config.algorithm.corrections, "algorithm.corrections"
    yield config.gate.correction, "gate.correction"


@rule
def bypass_excludes_weights(config: RunConfig) -> Iterator[Violation]:
    """In bypass the anchor of the ratio is the engine's log-prob: the mismatch that a weight would correct is in it."""
    for c, prefix in _corrections(config):
        if c.bypass and c.weight != "off":
            message = f"would correct the mismatch twice with weight {c.weight}"
            yield Violation(f"{prefix}.bypass", message, "set one of the two off", (f"{prefix}.weight",))


@rule
def correction_bounds_are_ranges(config: RunConfig) -> Iterator[Violation]:
    """Each lower bound lies below its upper one, and bounds of ratios are not negative."""
    for c, prefix in _corrections(config):
        for name in ("weight", "icepop", "mis", "geometric"):
            low, high = getattr(c, f"{name}_low"), getattr(c, f"{name}_high")
            if not 0 <= low < high:
                message = f"[{low}, {high}] is no range of ratios"
                yield Violation(f"{prefix}.{name}_low", message, "use 0 ≤ low < high", (f"{prefix}.{name}_high",))
        if not 0 < c.veto < 1:
            yield Violation(f"{prefix}.veto", "a token is vetoed below this ratio", "use a value in (0, 1)")


@rule
def correction_settings_are_read(config: RunConfig) -> Iterator[Violation]:
    """Bounds belong to a weight or rejection that is on; the denominator matters when something is rejected."""
    for c, prefix in _corrections(config):
        if c.weight == "off":
            yield from inert(c, prefix, "weight_low weight_high", "with weight off", (f"{prefix}.weight",))
        for name in ("icepop", "mis", "geometric", "veto"):
            if name not in c.reject:
                names = "veto" if name == "veto" else f"{name}_low {name}_high"
                yield from inert(c, prefix, names, f"without {name} in reject", (f"{prefix}.reject",))
        if not c.reject:
            yield from inert(c, prefix, "denominator", "without a rejection", (f"{prefix}.reject",))
        if len(set(c.reject)) < len(c.reject):
            yield Violation(f"{prefix}.reject", "names a rejection twice", "name each once")
