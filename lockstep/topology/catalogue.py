"""The catalogues as records: models and hardware by name, with the nearest name in the error for an unknown one."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from typing import Any, Literal

from lockstep.config.errors import ConfigError, Violation
from lockstep.topology.records import Hardware, ModelShape

_RULES = {
    *("window_period", "index_full", "index_from", "index_period"),
    *("compress_head", "compress_cycle", "pruned", "published", "published_base", "source"),
}
"""Keys of ``catalog/models.toml`` that are no fields of ``ModelShape``: rules for lists of layers, and notes."""


@functools.cache
def read_catalogue(name: str) -> Mapping[str, Any]:
    """A data file of ``topology/catalog`` as it stands ("models", "hardware", "layouts", "engine_args")."""
    return tomllib.loads(resources.files("lockstep.topology").joinpath("catalog", f"{name}.toml").read_text("utf-8"))


def model_names() -> list[str]:
    """Every model of the catalogue, pruned copies ("deepseek-v4-flash-4layer") included."""
    entries = read_catalogue("models")
    pruned = [f"{name}-{count}layer" for name, entry in entries.items() for count in entry.get("pruned", ())]
    return sorted([*entries, *pruned])


def hardware_names() -> list[str]:
    """Every kind of device of the catalogue."""
    return sorted(read_catalogue("hardware"))


@functools.cache
def model_shape(name: str) -> ModelShape:
    """A model of the catalogue. Raises ``ConfigError`` for an unknown name."""
    if name not in model_names():
        raise _unknown("model", name, model_names())
    entries = read_catalogue("models")
    if name not in entries:
        base, _, suffix = name.rpartition("-")
        return prune(model_shape(base), int(suffix.removesuffix("layer")))
    entry = entries[name]
    fields: dict[str, Any] = {key: value for key, value in entry.items() if key not in _RULES}
    return ModelShape(name=name, **fields, **_layer_lists(entry))


def published_precision(name: str, *, base: bool = False) -> Literal["fp8", "mxfp4_experts"] | None:
    """What the weights of a model's own repository are in, of the one called Base where ``base``; None where the
    catalogue says nothing but bf16, and for pruned copies, which nobody publishes."""
    entry = read_catalogue("models").get(name, {})
    return entry.get("published_base" if base else "published")


def prune(shape: ModelShape, num_layers: int) -> ModelShape:
    """The copy that keeps the first layers and no MTP layer."""
    return replace(
        shape,
        name=f"{shape.name}-{num_layers}layer",
        num_layers=num_layers,
        dense_layers=min(shape.dense_layers, num_layers),
        hash_layers=min(shape.hash_layers, num_layers),
        compress_ratios=shape.compress_ratios[:num_layers],
        window_layers=tuple(layer for layer in shape.window_layers if layer < num_layers),
        index_layers=tuple(layer for layer in shape.index_layers if layer < num_layers),
        mtp_layers=0,
    )


def hardware(name: str) -> Hardware:
    """A kind of device. Raises ``ConfigError`` for an unknown name."""
    entries = read_catalogue("hardware")
    if name not in entries:
        raise _unknown("hardware", name, hardware_names())
    entry = entries[name]
    memory = entry.get("memory_mib")
    return Hardware(
        name=name,
        vendor=entry["vendor"],
        arch=entry.get("arch", ""),
        memory_bytes=None if memory is None else memory << 20,
        memory_bandwidth_gbs=entry.get("memory_bandwidth"),
        gpus_per_node=entry.get("gpus_per_node", 8),
        fast_link_gpus=entry.get("fast_link_gpus"),
        fp8=entry.get("fp8"),
        fp4=entry.get("fp4", False),
    )


def _layer_lists(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The per-layer tuples that an entry states as rules."""
    layers = range(entry["num_layers"])
    lists: dict[str, Any] = {}
    if period := entry.get("window_period"):
        lists["window_layers"] = tuple(layer for layer in layers if (layer + 1) % period)
    if period := entry.get("index_period"):
        lists["index_layers"] = (*entry["index_full"], *range(entry["index_from"], len(layers), period))
    if cycle := entry.get("compress_cycle"):
        head = entry["compress_head"]
        tail = (cycle[index % len(cycle)] for index in range(len(layers) - len(head)))
        lists["compress_ratios"] = (*head, *tail)
    return lists


def _unknown(kind: str, name: str, names: list[str]) -> ConfigError:
    near = difflib.get_close_matches(name, names, n=1)
    way_out = f'did you mean "{near[0]}"?' if near else "name one of the catalogue"
    problem = Violation("", f'there is no {kind} "{name}" in the catalogue', way_out, allowed=", ".join(names))
    return ConfigError(f"{kind} {name}", [problem])
