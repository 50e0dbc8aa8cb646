"""What a recipe expects of a model's configuration, and the comparison with what ``config.json`` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lockstep.checkpoint.errors import Problem, shown
from lockstep.topology.records import ModelShape

_ALSO = {
    "inkling_text": ("inkling_mm_model",),
    "InklingForCausalLM": ("InklingForConditionalGeneration",),
}
"""What publishes a model beside its language model alone: the whole with its towers."""
_NOT_IN_CONFIG = {"name", "model_type", "architecture", "attention", "qk_norm", "attention_bias", "router_score"}
_ZERO_COUNTS = {"tied_embeddings", "mtp_layers", "dense_layers", "hash_layers"}
"""Fields of ``ModelShape`` whose 0 is a statement, not a blank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What must be so; whatever is left out is not asked.

    ``values`` are sizes by the names of ``ModelShape`` (and ``rope_theta``, ``rope_type``). ``quantisation``: none,
    fp8, fp8_ue8m0 or mxfp4_experts. ``forbidden_keys`` are refused anywhere in ``config.json``, beside the keys that
    make a loader run code, which always are.

    Example: ``Expectation(model_types=("llama",), values={"num_layers": 30, "tied_embeddings": True})``.
    """

    model_types: Sequence[str] = ()
    architectures: Sequence[str] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    quantisation: str | None = None
    forbidden_keys: Sequence[str] = ()


def expectation_of(
    shape: ModelShape, quantisation: str | None = None, forbidden_keys: Sequence[str] = ()
) -> Expectation:
    """What a model of the catalogue expects: every size that its entry states."""
    stated = {item.name: getattr(shape, item.name) for item in fields(shape) if item.name not in _NOT_IN_CONFIG}
    return Expectation(
        model_types=(shape.model_type, *_ALSO.get(shape.model_type, ())),
        architectures=(shape.architecture, *_ALSO.get(shape.architecture, ())) if shape.architecture else (),
        values={name: value for name, value in stated.items() if value or name in _ZERO_COUNTS},
        quantisation=quantisation,
        forbidden_keys=forbidden_keys,
    )


def check_config(
    config: Mapping[str, Any], facts: Mapping[str, Any], scheme: str | None, expected: Expectation
) -> tuple[list[Problem], list[str]]:
    """Problems where configuration and expectation differ, and notes on what could not be compared.

    ``facts`` are what the family read, ``scheme`` the quantisation; both empty if the model type has no list here.
    """
    problems, notes = [], []
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else [architectures]
    if expected.model_types and config.get("model_type") not in expected.model_types:
        problems.append(_differs("model_type", config.get("model_type"), " or ".join(expected.model_types)))
    if expected.architectures and (len(names) != 1 or names[0] not in expected.architectures):
        problems.append(_differs("architectures", architectures, " or ".join(expected.architectures)))
    for name, value in expected.values.items():
        if name not in facts:
            if value:
                notes.append(f"{name}: not compared, since nothing of the kind is read for this model type")
        elif name == "mtp_layers" and facts[name] == 0:
            notes.extend([f"mtp_layers: none, of {value} that the model has"] if value else [])
        elif facts[name] != value:
            problems.append(_differs(name, facts[name], value))
    if expected.quantisation is not None and scheme is not None and scheme != expected.quantisation:
        problems.append(_differs("quantisation", scheme, expected.quantisation))
    problems += [
        Problem("forbidden key", f"config.json: {shown(place)}: remove it")
        for place in places_of(config, expected.forbidden_keys)
    ]
    return problems, notes


def _differs(name: str, found: object, wanted: object) -> Problem:
    return Problem("config.json is not what the recipe expects", f"{name} is {shown(found)}, expected {shown(wanted)}")


def places_of(value: Any, keys: Sequence[str], place: str = "") -> list[str]:
    """Dotted places of keys anywhere in a configuration."""
    if isinstance(value, dict):
        inner = [(f"{place}.{key}" if place else key, key, item) for key, item in value.items()]
    elif isinstance(value, list):
        inner = [(f"{place}[{number}]", None, item) for number, item in enumerate(value)]
    else:
        return []
    found = [where for where, key, _ in inner if key in keys]
    return found + [deep for where, key, item in inner if key not in keys for deep in places_of(item, keys, where)]
