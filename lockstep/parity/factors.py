"""The factors that any run has: what could make the two sides differ, and how it is taken away.

A factor removes one difference between the sides and leaves the rest as it was. What restores agreement points at the
cause; a factor that does not apply to a run (its engine is float32 already) is left out. Own factors are added as
``Factor(name, says, change)`` with ``change`` a function from ``Setting`` to ``Setting``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from lockstep.model.head import takes_float32_head
from lockstep.parity.attribute import Factor
from lockstep.parity.replay import Bench, Setting
from lockstep.train.routing_replay import can_replay

_LAYER = re.compile(r"^(.*?\.layers\.\d+)\.")

Change = Callable[[Setting], Setting]


class FactorError(ValueError):
    """A name that is no factor of this run; the text lists those that are."""


def _factor(name: str, says: str, **fields: Any) -> Factor:
    return Factor(name, says, lambda setting: replace(setting, **fields))


PREFILL = _factor("prefill", "the engine scores in one prefill, without its cache", path="prefill")
ONE_BY_ONE = _factor("one-by-one", "the engine scores each sequence alone: no batch, no padding", one_by_one=True)
BUFFERS = _factor("buffers", "layout buffers (rotary tables) are the trainer's", buffers=True)
FLOAT32_HEAD = _factor("float32-head", "both output heads compute in float32", float32_head=True)
ROUTING_REPLAY = Factor(
    "routing-replay",
    "the trainer runs the experts that the engine chose",
    lambda setting: replace(
        setting,
        rollout=setting.rollout.model_copy(update={"record_routes": True}),
        trainer=setting.trainer.model_copy(update={"routing_replay": True}),
    ),
)
UNQUANTISED = Factor(
    "unquantised",
    "the engine's weights are the trainer's, not quantised",
    lambda setting: replace(setting, rollout=setting.rollout.model_copy(update={"quantisation": "none"})),
)
TRAINER_TEMPERATURE_1 = _factor("trainer-temperature-1", "trainer at temperature 1", trainer_temperature=1.0)


def builtin_factors(bench: Bench) -> list[Factor]:
    """Factors that change something on ``bench``, likeliest causes first."""
    setting = bench.setting
    rollout, trainer = setting.rollout, setting.trainer
    has_bfloat16 = "bfloat16" in (rollout.dtype, trainer.dtype)
    candidates = [
        (True, _load_factor(bench)),
        (setting.path == "decode", PREFILL),
        (rollout.temperature != 1.0, _rollout("engine-temperature-1", "engine at temperature 1", temperature=1.0)),
        (setting.trainer_temperature != 1.0, TRAINER_TEMPERATURE_1),
        (rollout.fast_path != "off", _rollout("fast-path-off", "transformers' modules decode", fast_path="off")),
        (True, ONE_BY_ONE),
        (trainer.packing != "single", _trainer("packing-single", "the trainer packs nothing", packing="single")),
        (True, BUFFERS),
        (rollout.quantisation != "none", UNQUANTISED),
        (rollout.dtype != "float32", _rollout("engine-float32", "the engine computes in float32", dtype="float32")),
        (trainer.dtype != "float32", _trainer("trainer-float32", "the trainer computes in float32", dtype="float32")),
        (has_bfloat16 and takes_float32_head(bench.model), FLOAT32_HEAD),
        (not trainer.routing_replay and can_replay(bench.model), ROUTING_REPLAY),
    ]
    return [factor for applies, factor in candidates if applies]


def choose_factors(available: Seq[Factor], names: Seq[str]) -> list[Factor]:
    """The named ones, in the given order; NAME=VALUE is an environment variable. All if none is named.

    Raises FactorError for an unknown name.
    """
    by_name = {factor.name: factor for factor in available}
    if not names:
        return list(available)
    chosen = []
    for name in names:
        if name in by_name:
            chosen.append(by_name[name])
        elif "=" in name:
            chosen.append(environment_factor(*name.split("=", 1)))
        else:
            raise FactorError(f"no factor {name!r} applies here; there are {', '.join(by_name)}, or NAME=VALUE")
    return chosen


def environment_factor(variable: str, value: str) -> Factor:
    """An environment variable that is set while both sides are built and score."""
    return Factor(
        f"{variable}={value}",
        "an environment variable",
        lambda setting: replace(setting, environment=(*setting.environment, (variable, value))),
    )


def reload_factor(name: str, says: str, prefixes: tuple[str, ...], parts: tuple[Factor, ...] = ()) -> Factor:
    """Tensors under these prefixes are loaded from the trainer instead of taken as the engine served them."""
    return Factor(name, says, lambda setting: replace(setting, reload=(*setting.reload, *prefixes)), parts)


def _load_factor(bench: Bench) -> Factor:
    """All weights loaded afresh instead of refitted; its parts are the layers and what lies around them, as far as the
    engine served anything else there: loading the same again can't matter and is not worth a run."""
    groups: dict[str, list[str]] = {}
    for name in bench.model.state_dict():
        layer = _LAYER.match(name)
        groups.setdefault(layer.group(1) if layer else name, []).append(name)
    parts = tuple(
        # A layer is a prefix that ends in a dot: "layers.1." and not "layers.1", which would be layer 10 as well.
        reload_factor(f"load:{group}", "the same of this part alone", (group if names == [group] else f"{group}.",))
        for group, names in groups.items()
        if not bench.served.keys().isdisjoint(names)
    )
    return reload_factor("load", "all weights loaded from the trainer, not refitted", ("",), parts)


def _rollout(name: str, says: str, **fields: Any) -> Factor:
    return Factor(name, says, lambda setting: replace(setting, rollout=setting.rollout.model_copy(update=fields)))


def _trainer(name: str, says: str, **fields: Any) -> Factor:
    return Factor(name, says, lambda setting: replace(setting, trainer=setting.trainer.model_copy(update=fields)))
