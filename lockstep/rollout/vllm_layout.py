"""A vLLM model's live weights under checkpoint names, its layout undone; what can't be undone is loaded once more.

Which part of which parameter a checkpoint tensor fills is known from the engine's own loader (``vllm_plan``). Where the
live parameter still has the layout that the loader wrote, the part is cut out again: q/k/v, gate/up, expert stacks.
Where a kernel re-packed it (or keeps it outside of any parameter, as the CPU's linear layers do), the layer is
*opaque*: the engine's own loader and post-processing run a second time into a scratch layer, and bytes are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.rollout.vllm_coverage import Geometry
from lockstep.rollout.vllm_plan import LoadPlan, is_engine_owned
from lockstep.rollout.vllm_reload import LayerwiseReload, scratch_layer

_PLAIN_METHODS = {"UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"}
"""Quantisation methods that leave a parameter of unchanged shape as it was loaded."""
_PLAIN_MOE_BACKENDS = {"TRITON", "BATCHED_TRITON"}

PROBE_ROWS = 256
"""Rows of the identity that are sent through a packed linear layer at once, to read its weight back."""


class LiveLayout:
    """The live weights of ``model`` as a ``LoadPlan`` placed them."""

    def __init__(self, model: torch.nn.Module, plan: LoadPlan, reload: LayerwiseReload) -> None:
        self._model = model
        self._plan = plan
        self._reload = reload
        self._opaque_layers = self._find_opaque()

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, tensor) for each tensor of this rank whose layout can be undone."""
        for name, writes in self._plan.writes.items():
            if not writes or self._reason(name):
                continue
            sources = [write.source for write in writes]
            tensors = [_part(self._tensor(write.target), write.region) for write in writes]
            first = sources[0]
            if len(writes) == 1 and first is not None and first == _whole(self._plan.shapes[name]):
                yield name, tensors[0].reshape(first[0])
                continue
            whole = torch.empty(self._plan.shapes[name], dtype=tensors[0].dtype, device=tensors[0].device)
            for tensor, source in zip(tensors, sources, strict=True):
                if source is not None:
                    _part(whole, source).copy_(tensor)
            yield name, whole

    def places(self) -> dict[str, tuple[tuple[torch.Tensor, Geometry], ...]] | None:
        """For each name the views of live storage that it fills and the part of it that goes there; None if a layer is
        opaque, a tensor is computed on its way, a live tensor is not one piece of storage, or some module derives more
        after loading (latent attention, kernels with a layout or a copy of their own)."""
        # vLLM's methods are modules too, registered below their layer: what they do to it, its layout was judged by.
        judged = {id(getattr(layer, "quant_method", None)) for layer in self._model.modules()}
        others = (module for module in self._model.modules() if id(module) not in judged)
        if self._opaque_layers or any(map(_derives_after_loading, others)):
            return None
        places: dict[str, tuple[tuple[torch.Tensor, Geometry], ...]] = {}
        for name, writes in self._plan.writes.items():
            pieces = []
            for write in writes:
                live = self._tensor(write.target)
                if write.source is None or not live.is_contiguous():
                    return None
                pieces.append((_part(live, write.region), write.source))
            places[name] = tuple(pieces)
        return places

    def addresses(self) -> dict[str, int]:
        """Where each live tensor lies now."""
        return {target: self._tensor(target).data_ptr() for target in self._filled()}

    def opaque(self) -> dict[str, str]:
        """Names in layers whose layout can't be undone, each with the reason."""
        reasons = {name: self._reason(name) for name, writes in self._plan.writes.items() if writes}
        return {name: reason for name, reason in reasons.items() if reason}

    def unfilled(self) -> dict[str, str]:
        """Parameters and persistent buffers that the model has now and the plan does not know, each with the reason.
        What a kernel's layout added to a layer is compared by the second load; what a module that post-processes itself
        made (latent attention's ``W_UV``) is the registry's."""
        known = {self._tensor(target).data_ptr() for target in self._filled() if self._exists(target)}
        found: dict[str, str] = {}
        for path, layer in self._model.named_modules():
            if path in self._opaque_layers or _derives_after_loading(layer):
                continue
            if type(layer).__name__ in self._reload.skipped_modules:  # constants that vLLM itself never reloads
                continue
            tensors = {**layer._buffers, **layer._parameters}
            for leaf, tensor in tensors.items():
                name = f"{path}.{leaf}" if path else leaf
                if tensor is None or not tensor.numel() or leaf in layer._non_persistent_buffers_set:
                    continue
                if name in self._reload.layout_buffers:
                    continue
                if name not in self._plan.targets and tensor.data_ptr() not in known and not is_engine_owned(name):
                    found[name] = "live, and no tensor of the manifest fills it"
        return found

    def differences(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, str | None]]:
        """Load opaque layers again into scratch and compare: (name, None or what differs)."""
        waiting: dict[int, list[tuple[str, torch.Tensor]]] = defaultdict(list)
        for name, tensor in tensors:
            unit = self._plan.unit[name]
            waiting[unit].append((name, tensor))
            if len(waiting[unit]) == self._plan.unit_size[unit]:
                ready = waiting.pop(unit)
                found = self._compare_unit(ready)
                yield from ((one, found) for one, _ in ready)
        for rest in waiting.values():
            absent = sorted(n for n, u in self._plan.unit.items() if u == self._plan.unit[rest[0][0]])
            yield from ((name, f"could not be loaded again without all of {absent[:4]}") for name, _ in rest)

    def _compare_unit(self, tensors: list[tuple[str, torch.Tensor]]) -> str | None:
        paths = sorted({path for name, _ in tensors for path in self._plan.layers[name]})
        layers = {path: self._model.get_submodule(path) for path in paths}
        scratch = {path: scratch_layer(layer, self._reload, _device(layer)) for path, layer in layers.items()}
        with torch.no_grad():
            with _swapped(self._model, scratch):
                self._model.load_weights(iter(tensors))  # pyright: ignore[reportCallIssue]
            for path, layer in scratch.items():
                method = getattr(layer, "quant_method", None)
                if method is not None:
                    method.process_weights_after_loading(layer)
                # Tensors that several modules hold (a router's correction) are compared under their own name.
                elsewhere = self._reload.skipped_tensors - self._written(tensors, path)
                if difference := _layer_difference(layers[path], layer, elsewhere):
                    return f"{path}: {difference}"
        return None

    def _written(self, tensors: list[tuple[str, torch.Tensor]], path: str) -> set[str]:
        """Names of the layer at ``path`` that the loader writes from these tensors."""
        targets = [write.target.rpartition(".") for name, _ in tensors for write in self._plan.writes[name]]
        return {leaf for owner, _, leaf in targets if owner == path}

    def _find_opaque(self) -> dict[str, str]:
        reasons: dict[str, str] = {}
        for writes in self._plan.writes.values():
            for write in writes:
                path, _, leaf = write.target.rpartition(".")
                layer = self._model.get_submodule(path)
                reason = _layer_reason(layer, leaf, self._plan.targets[write.target])
                if write.source is None and not reason:
                    reason = f"{type(layer).__name__}: the loader converts {leaf} on its way"
                if reason:
                    reasons.setdefault(path, reason)
        # What travels together is loaded together, so one opaque layer takes its unit along.
        units = {
            self._plan.unit[n]: r for n, paths in self._plan.layers.items() for p, r in reasons.items() if p in paths
        }
        for name, paths in self._plan.layers.items():
            if (reason := units.get(self._plan.unit[name])) is not None:
                for path in paths:
                    reasons.setdefault(path, reason)
        return reasons

    def _reason(self, name: str) -> str:
        return next((self._opaque_layers[p] for p in self._plan.layers[name] if p in self._opaque_layers), "")

    def _filled(self) -> set[str]:
        return {write.target for writes in self._plan.writes.values() for write in writes}

    def _exists(self, target: str) -> bool:
        path, _, leaf = target.rpartition(".")
        return isinstance(getattr(self._model.get_submodule(path), leaf, None), torch.Tensor)

    def _tensor(self, target: str) -> torch.Tensor:
        path, _, leaf = target.rpartition(".")
        return getattr(self._model.get_submodule(path), leaf).detach()


def _derives_after_loading(module: torch.nn.Module) -> bool:
    """Whether vLLM computes something of this module after a load. Plain attention hands the call on to its back end,
    of which the base class does nothing."""
    if not callable(getattr(module, "process_weights_after_loading", None)):
        return False
    hook = getattr(type(getattr(module, "impl", None)), "process_weights_after_loading", None)
    idle = hook is not None and hook.__qualname__.startswith("AttentionImpl")
    return not (type(module).__name__ == "Attention" and idle)


def _layer_reason(layer: torch.nn.Module, leaf: str, wanted: torch.Tensor) -> str:
    """Why a live parameter is not what the loader wrote; empty if it is."""
    kind = type(layer).__name__
    live = getattr(layer, leaf, None)
    if not isinstance(live, torch.Tensor) or live.shape != wanted.shape or live.dtype != wanted.dtype:
        now = "gone" if not isinstance(live, torch.Tensor) else f"{tuple(live.shape)} {live.dtype}"
        return f"{kind}: {leaf} {tuple(wanted.shape)} {wanted.dtype} lies in a kernel's layout ({now})"
    method: Any = getattr(layer, "quant_method", None)
    if method is None:
        return ""
    backend = getattr(getattr(method, "unquantized_backend", None), "value", None)
    if backend is not None:
        if str(backend).upper() in _PLAIN_MOE_BACKENDS:
            return ""
        return f"{kind}: {leaf} is re-packed for the {backend} kernel in place"
    if type(method).__name__ in _PLAIN_METHODS:
        return ""
    return f"{kind}: {leaf} is in the layout of {type(method).__name__}"


def _layer_difference(live: torch.nn.Module, again: torch.nn.Module, elsewhere: frozenset[str]) -> str | None:
    """What differs between a layer and its second load, but for what is loaded ``elsewhere``; None if nothing does."""
    for kind in ("_parameters", "_buffers"):
        mine: Mapping[str, Any] = getattr(live, kind)
        theirs: Mapping[str, Any] = getattr(again, kind)
        for name in sorted((mine.keys() & theirs.keys()) - elsewhere):
            one, other = mine[name], theirs[name]
            if one is None or other is None or (kind == "_buffers" and name in live._non_persistent_buffers_set):
                continue
            if one.shape != other.shape or one.dtype != other.dtype:
                return f"{name} is {tuple(one.shape)} {one.dtype}, loaded again {tuple(other.shape)} {other.dtype}"
            if one.numel() and (num := int((_bytes(one) != _bytes(other)).any(-1).sum())):
                return f"{num} of {one.numel()} values of {name} differ from a second load"
    weight = getattr(live, "weight", None)
    if callable(getattr(live, "cpu_linear", None)) and isinstance(weight, torch.Tensor) and weight.numel() == 0:
        return _packed_difference(live, again)
    return None


def _packed_difference(live: torch.nn.Module, again: torch.nn.Module) -> str | None:
    """Compare the weights inside two packed linear layers by sending the identity through both."""
    size = _input_size(live)
    parameter = live.weight
    bias = getattr(live, "bias", None)
    dtype = parameter.dtype if isinstance(parameter, torch.Tensor) else torch.float32
    identity = torch.eye(size, dtype=dtype)  # pyright: ignore[reportArgumentType]
    for start in range(0, size, PROBE_ROWS):
        rows = identity[start : start + PROBE_ROWS]
        one = live.cpu_linear(rows, live.weight, bias)  # pyright: ignore[reportCallIssue]
        other = again.cpu_linear(rows, again.weight, getattr(again, "bias", None))  # pyright: ignore[reportCallIssue]
        if num := int((_bytes(one) != _bytes(other)).any(-1).sum()):
            return f"{num} values of its packed weight differ from a second load"
    return None


def _input_size(layer: torch.nn.Module) -> int:
    for name in ("input_size_per_partition", "input_size", "embedding_dim"):
        if (size := getattr(layer, name, None)) is not None:
            return int(size)
    raise TypeError(f"{type(layer).__name__}: its packed weight's input size is unknown")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[numel, bytes per value]: NaN equals itself, −0 differs from 0."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), -1)


def _whole(shape: tuple[int, ...]) -> Geometry:
    """The geometry of an entire contiguous tensor."""
    return shape, tuple(torch.empty(shape, device="meta").stride()), 0


def _part(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    size, stride, offset = geometry
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _device(layer: torch.nn.Module) -> torch.device:
    for tensor in (*layer._parameters.values(), *layer._buffers.values()):
        if tensor is not None:
            return tensor.device
    return torch.device("cpu")


@contextmanager
def _swapped(model: torch.nn.Module, layers: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """Inside, ``layers`` stand in the model at their paths."""
    parents = {path: model.get_submodule(path.rpartition(".")[0]) for path in layers}
    before = {path: model.get_submodule(path) for path in layers}
    try:
        for path, layer in layers.items():
            parents[path]._modules[path.rpartition(".")[2]] = layer
        yield
    finally:
        for path, layer in before.items():
            parents[path]._modules[path.rpartition(".")[2]] = layer
