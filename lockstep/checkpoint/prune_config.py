"""What ``config.json`` says of layers, after some are taken out: numbers, lists, leading counts, schedules, names.

A key that looks as if it spoke of layers and is not known here is refused: left as it is, it would speak of others.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lockstep.checkpoint.errors import Problem, shown

PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types", "compress_ratios")
"""Lists with an entry for each layer; ``compress_ratios`` has the MTP layers' behind them."""
LAYER_IDS = ("local_layer_ids", "mlp_only_layers")
"""Lists of layer numbers."""
LEADING = ("first_k_dense_replace", "num_hash_layers", "dense_mlp_idx", "max_window_layers")
"""How many of the first layers are of a kind. Kept layers ascend, so that those of them still come first."""
SCHEDULES = ("index_topk_pattern", "index_topk_freq", "decoder_sparse_step", "moe_layer_freq")
MAX_LAYERS = 4096
_NOT_OF_LAYERS = ("num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers", "mtp_local_layer_ids")
_KNOWN = {*PER_LAYER, *LAYER_IDS, *LEADING, *SCHEDULES, *_NOT_OF_LAYERS}
_SUSPICIOUS = re.compile(r"(layers?|layer_(ids|idx|list|map)|_types|_ratios|_pattern)$")
_NUMBER = re.compile(r"(0|[1-9][0-9]{0,8})\.")
_LAYER_IN_NAME = re.compile(r"^((?:[\w.]*\.)?layers\.)(\d+)(?=\.|$)")
_LAYER_IN_PATTERN = re.compile(r"layers(\\?\.|\[)")


@dataclass(frozen=True, slots=True)
class Family:
    """Where a model type keeps its layers: tensor prefix, prefix of MTP layers that are stored apart (empty: behind the
    last layer), and the section of ``config.json``."""

    prefix: str
    apart: str = ""
    section: str = ""


_LLAMA = Family("model.layers.")
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "glm_moe_dsa"), _LLAMA),
    "deepseek_v4": Family("layers.", apart="mtp."),
    "inkling_mm_model": Family("model.llm.layers.", apart="model.mtp.layers.", section="text_config"),
    "inkling_text": Family("model.llm.layers.", apart="model.mtp.layers."),
}
"""transformers' model types that can be pruned."""


@dataclass(frozen=True)
class LayerMap:
    """Old layer numbers to new ones. ``num_layers``: of the source; ``num_mtp``: its MTP layers."""

    family: Family
    keep: tuple[int, ...]
    num_layers: int
    num_mtp: int
    keep_mtp: bool

    @property
    def num_behind(self) -> int:
        """MTP layers that are numbered on from the last layer."""
        return 0 if self.family.apart else self.num_mtp

    @property
    def is_prefix(self) -> bool:
        """Whether every kept layer keeps its number."""
        return self.keep == tuple(range(len(self.keep)))

    @cached_property
    def numbers(self) -> Mapping[int, int]:
        """New numbers by old, of the layers that are kept, MTP layers behind the last included."""
        behind = range(self.num_layers, self.num_layers + self.num_behind) if self.keep_mtp else ()
        return {old: new for new, old in enumerate((*self.keep, *behind))}

    def number(self, name: str) -> int | None:
        """The layer that a tensor belongs to; None for one outside of the layers."""
        found = _NUMBER.match(name, len(self.family.prefix)) if name.startswith(self.family.prefix) else None
        return None if found is None else int(found[1])

    def is_apart(self, name: str) -> bool:
        """Whether a tensor or module is of MTP layers that are stored apart."""
        return bool(self.family.apart) and name.startswith(self.family.apart)

    def renamed(self, name: str) -> str | None:
        """A tensor's new name; None if it goes."""
        number = self.number(name)
        if number is None:
            return None if self.is_apart(name) and not self.keep_mtp else name
        new = self.numbers.get(number)
        prefix = self.family.prefix
        return None if new is None else f"{prefix}{new}{name[len(f'{prefix}{number}') :]}"

    def listed(self, value: list[Any]) -> list[Any]:
        """A per-layer list without the layers that go; entries behind the last layer are the MTP layers'."""
        return [value[layer] for layer in self.keep] + (value[self.num_layers :] if self.keep_mtp else [])


def layer_map(
    config: Mapping[str, Any], keep: tuple[int, ...], *, keep_mtp: bool, problems: list[Problem]
) -> LayerMap | None:
    """The layers of a configuration; None, with problems, if it can't be told or ``keep`` names others."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        text = f"model_type {shown(model_type)}: where it keeps its layers is not known; known: {', '.join(FAMILIES)}"
        problems.append(Problem("refused", text))
        return None
    family = FAMILIES[model_type]
    text = config.get(family.section) if family.section else config
    num_layers = text.get("num_hidden_layers") if isinstance(text, Mapping) else None
    num_mtp = _num_mtp(config, family)
    if type(num_layers) is not int or not 0 < num_layers <= MAX_LAYERS or num_mtp > MAX_LAYERS:
        text = f"num_hidden_layers {shown(num_layers)} with {shown(num_mtp)} MTP layers: no model has such numbers"
        problems.append(Problem("refused", text))
        return None
    wrong = [layer for layer in keep if type(layer) is not int or not 0 <= layer < num_layers]
    if not keep or wrong or list(keep) != sorted(set(keep)):
        shape = "ascending numbers of layers, each once, at least one"
        text = f"layers to keep are {shown(list(keep)[:20])}: they must be {shape}, below {num_layers}"
        problems.append(Problem("refused", text))
        return None
    return LayerMap(family, keep, num_layers, num_mtp, keep_mtp)


def _num_mtp(config: Mapping[str, Any], family: Family) -> int:
    places = [config, config.get("mtp_config"), config.get(family.section)]
    for place in places:
        for key in ("num_nextn_predict_layers", "num_mtp_layers"):
            if isinstance(place, Mapping) and type(place.get(key)) is int:
                return max(0, place[key])
    return 0


def pruned_config(config: Mapping[str, Any], layers: LayerMap, problems: list[Problem]) -> dict[str, Any]:
    """The configuration of the kept layers. Notes a problem for each thing that can't be carried over."""
    result = copy.deepcopy(dict(config))
    text = result[layers.family.section] if layers.family.section else result
    _check_unknown(text, problems)
    schedule = _index_types(text, layers.num_layers)
    for key in PER_LAYER:
        if text.get(key) is not None:
            text[key] = _sliced(key, text[key], layers, problems)
    for key in LAYER_IDS:
        if text.get(key) is not None:
            text[key] = _renumbered(key, text[key], layers, problems)
    for key in LEADING:
        if type(text.get(key)) is int:
            text[key] = sum(layer < text[key] for layer in layers.keep)
    _sparse_step(config, text, layers)
    if schedule is not None:
        _index_share(text, schedule, layers, problems)
    text["num_hidden_layers"] = len(layers.keep)
    if not layers.keep_mtp:
        _drop_mtp(result, text)
    if "quantization_config" in result:
        result["quantization_config"] = _renamed_modules(result["quantization_config"], layers, problems)
    return result


def _check_unknown(text: Mapping[str, Any], problems: list[Problem]) -> None:
    for key, value in text.items():
        if key not in _KNOWN and _SUSPICIOUS.search(key) and not isinstance(value, bool) and value:
            problems.append(Problem("refused", f"config.json: {shown(key)} may speak of layers and is not known here"))
    freq = text.get("moe_layer_freq", 1)
    if freq not in (1, None):
        problems.append(Problem("refused", f"config.json: moe_layer_freq {shown(freq)} is not known here; 1 is"))


def _sliced(key: str, value: Any, layers: LayerMap, problems: list[Problem]) -> Any:
    lengths = {layers.num_layers, layers.num_layers + layers.num_mtp}
    if not isinstance(value, list) or len(value) not in lengths:
        got = f"{len(value)} entries" if isinstance(value, list) else shown(value)
        text = f"config.json: {key} must have {layers.num_layers} entries, one a layer; it has {got}"
        problems.append(Problem("refused", text))
        return value
    return layers.listed(value)


def _renumbered(key: str, value: Any, layers: LayerMap, problems: list[Problem]) -> Any:
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < layers.num_layers for n in value):
        problems.append(Problem("refused", f"config.json: {key} must be a list of numbers below {layers.num_layers}"))
        return value
    return [layers.numbers[number] for number in value if number in layers.numbers]


def _sparse_step(config: Mapping[str, Any], text: dict[str, Any], layers: LayerMap) -> None:
    """Qwen3-MoE: every n-th layer is sparse. Where numbers move, the dense ones are listed instead."""
    step = text.get("decoder_sparse_step")
    if type(step) is not int or step <= 1 or layers.is_prefix:
        return
    listed = set(config.get("mlp_only_layers") or ())
    dense = [new for new, old in enumerate(layers.keep) if old in listed or (old + 1) % step]
    text |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _index_types(text: Mapping[str, Any], num_layers: int) -> list[str] | None:
    """GLM-5's index sharing: which layers choose tokens ("full") and which use the last choice ("shared")."""
    stated, pattern = text.get("indexer_types"), text.get("index_topk_pattern")
    if isinstance(stated, list) and len(stated) == num_layers:
        return list(stated)
    if isinstance(pattern, str) and len(pattern) == num_layers:
        return ["full" if letter == "F" else "shared" for letter in pattern]
    return None if "index_topk_freq" not in text else _scheduled(text, num_layers)


def _scheduled(text: Mapping[str, Any], num_layers: int) -> list[str] | None:
    """``max(layer - offset + 1, 0) % freq == 0`` is full: transformers' ``GlmMoeDsaConfig``, and the engines' rule."""
    period, offset = text.get("index_topk_freq"), text.get("index_skip_topk_offset", 2)
    if type(period) is not int or type(offset) is not int or period < 1:
        return None
    return ["full" if max(n - offset + 1, 0) % period == 0 else "shared" for n in range(num_layers)]


def _index_share(text: dict[str, Any], types: list[str], layers: LayerMap, problems: list[Problem]) -> None:
    """A layer that shares must keep the layer whose choice it uses: the last full one before it.

    Without that it would take an earlier layer's choice, or find none. Engines go by a schedule of layer numbers, which
    no longer holds where numbers move: then the pattern states it.
    """
    for layer in layers.keep:
        leader = next((n for n in range(layer, -1, -1) if types[n] == "full"), None)
        if leader not in layers.keep:
            owner = "no layer" if leader is None else f"layer {leader}, which is not kept"
            text_ = f"layer {layer} shares the tokens that are chosen by {owner}: keep both or neither"
            problems.append(Problem("index-share group is broken", text_))
    kept = [types[layer] for layer in layers.keep]
    if "indexer_types" in text:
        text["indexer_types"] = kept
    if text.get("index_topk_pattern") is not None or _scheduled(text, len(kept)) not in (None, kept):
        text["index_topk_pattern"] = "".join("F" if kind == "full" else "S" for kind in kept)


def _drop_mtp(config: dict[str, Any], text: dict[str, Any]) -> None:
    for place in (config, text, config.get("mtp_config")):
        if isinstance(place, dict):
            for key, value in (
                *(("num_nextn_predict_layers", 0), ("num_mtp_layers", 0), ("mtp_local_layer_ids", [])),
                *((("local_layer_ids", []),) if place is config.get("mtp_config") else ()),
            ):
                if place.get(key) is not None:
                    place[key] = value


def _renamed_modules(value: Any, layers: LayerMap, problems: list[Problem]) -> Any:
    """``quantization_config`` with the modules that it names under their new numbers, without those that go."""
    if isinstance(value, dict):
        names = {key: _renamed_module(key, layers, problems) for key in value}
        return {new: _renamed_modules(value[old], layers, problems) for old, new in names.items() if new is not None}
    if isinstance(value, list):
        items = [_renamed_module(item, layers, problems) if isinstance(item, str) else item for item in value]
        return [_renamed_modules(item, layers, problems) for item in items if item is not None]
    return value


def _renamed_module(name: str, layers: LayerMap, problems: list[Problem]) -> str | None:
    if layers.is_apart(name):
        return name if layers.keep_mtp else None
    found = _LAYER_IN_NAME.match(name)
    if found is None:
        if _LAYER_IN_PATTERN.search(name) and re.search(r"\d", name) and not layers.is_prefix:
            text = f"quantization_config: {shown(name)} is a pattern of layers, which can't be renumbered"
            problems.append(Problem("refused", f"{text}: keep the first layers"))
        return name
    new = layers.numbers.get(int(found[2][:9]))
    return None if new is None else f"{found[1]}{new}{name[found.end() :]}"
