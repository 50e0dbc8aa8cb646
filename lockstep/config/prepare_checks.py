"""Rules of what ``lockstep prepare`` makes: settings that the stages asked for would not read, and formats of which a
refit brings another."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.config.algorithm_checks import inert, rule
from lockstep.config.errors import Violation
from lockstep.config.schema import RunConfig


@rule
def kept_mtp_layers_survive_a_cut(config: RunConfig) -> Iterator[Violation]:
    """A checkpoint that keeps all its layers keeps those of multi-token prediction whatever is asked for."""
    if config.prepare.keep_layers is None:
        because = "where all layers are kept: nothing is pruned"
        yield from inert(config.prepare, "prepare", "keep_mtp", because, ("prepare.keep_layers",))


@rule
def high_precision_is_beside_quantised_weights(config: RunConfig) -> Iterator[Violation]:
    """Only quantising reads names that stay as they are, and a refit that quantises does not."""
    asked, served = config.prepare.quantisation, config.rollout.quantisation
    also = ("prepare.quantisation", "rollout.quantisation")
    if asked == "none" or (asked == "as_rollout" and served == "none"):
        because = "where no engine's checkpoint is quantised"
        yield from inert(config.prepare, "prepare", "high_precision", because, also)
    elif served != "none" and config.prepare.high_precision:
        yield Violation(
            "prepare.high_precision",
            "refits follow the family's table alone: the engine would hold other bytes than a refit brings",
            'remove it, or set rollout.quantisation = "none"',
            ("rollout.quantisation",),
        )


@rule
def prepared_weights_are_what_a_refit_brings(config: RunConfig) -> Iterator[Violation]:
    """An engine that loads one quantised form can't be refitted with another."""
    asked, served = config.prepare.quantisation, config.rollout.quantisation
    if served != "none" and asked not in ("as_rollout", "none", served):
        yield Violation(
            "prepare.quantisation",
            f"is {asked}, and refits bring {served}",
            'leave it "as_rollout"',
            ("rollout.quantisation",),
        )
