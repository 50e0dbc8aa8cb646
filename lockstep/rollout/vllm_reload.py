"""The one place that touches vLLM's layer-wise reload: its functions, found by feature; tensors in checkpoint layout.

After loading, vLLM re-lays its weights for its kernels (packed, shuffled, quantised), and no loader can write into
that. Its layer-wise reload therefore remembers each layer's parameters as they were created (tensors without storage),
stages them again, loads, repeats the post-processing and copies the result into the storage that captured graphs know.
Lockstep uses those remembered tensors twice more: to ask the engine's own loader where a manifest would go (no byte
moves), and to load one layer a second time for comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_POISON = 0xFF
"""Filled into staging buffers: NaN in every floating type down to float8_e4m3fn and e8m0, so that what a loader never
wrote can't pass for a weight."""


class ReloadUnsupported(RuntimeError):
    """This vLLM has no layer-wise reload that Lockstep can drive; the text names what is missing."""


class LayerwiseReload:
    """vLLM's reload functions. Raises ReloadUnsupported where one is missing (detected, not guessed by version)."""

    def __init__(self) -> None:
        try:
            from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
                finalize_layerwise_reload,
                initialize_layerwise_reload,
                layerwise,
                meta,
                sanitize,
            )

            self.initialize = initialize_layerwise_reload
            self.finalize = finalize_layerwise_reload
            self._info = layerwise.get_layerwise_info
            self._process = layerwise._layerwise_process
            self._place = layerwise._place_kernel_tensors
            self._unwrapped = layerwise._get_original_loader
            self._default_loader = layerwise.default_weight_loader
            self._meta: Any = meta
            self._restore_refs = sanitize.restore_layer_refs
            self.skipped_tensors: frozenset[str] = frozenset(meta.SKIP_TENSORS)
            self.skipped_modules: frozenset[str] = frozenset(getattr(meta, "SKIP_MODULES", ()))
            self.layout_buffers: frozenset[str] = frozenset()
        except (ImportError, AttributeError) as error:
            raise ReloadUnsupported(
                f"vLLM's layer-wise weight reload is not as expected here ({error}); known to work: 0.32"
            ) from error

    def note_layout_buffers(self, model: torch.nn.Module) -> None:
        """Remember the buffers that no checkpoint holds (rotary tables). Before any reload: vLLM 0.24's makes them
        persistent by registering them again."""
        self.layout_buffers = frozenset(
            f"{path}.{leaf}" if path else leaf
            for path, layer in model.named_modules()
            for leaf in layer._non_persistent_buffers_set
        )

    def loadable(self, layer: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Fresh storage-less parameters and buffers of ``layer`` in checkpoint layout, loaders bound to ``layer``.

        Parameters that vLLM never re-stages (biases made late, router corrections) are twins of the live ones; expert
        maps are left out, because loaders read them.
        """
        parameters, buffers = self._info(layer).restore_metadata
        twins = {name: self._twin(tensor, layer) for name, tensor in parameters.items()}
        buffer_twins = {name: self._twin(tensor, layer) for name, tensor in buffers.items()}
        for name, tensor in layer._parameters.items():
            if tensor is not None and name in self.skipped_tensors and name not in twins:
                twins[name] = self._twin(tensor, layer)
        return twins, buffer_twins

    def _twin(self, tensor: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
        twin = self._restore_refs(self._meta.to_meta_tensor(tensor), layer)
        # A twin of a storage-less tensor shares its storage object, by which writes are told apart: give it its own.
        own = torch.empty_strided(twin.size(), twin.stride(), dtype=twin.dtype, device="meta")
        own.__class__ = twin.__class__
        vars(own).update(vars(twin))
        if hasattr(own, "weight_loader"):
            # A reload leaves its wrapper on the remembered tensor, and outside of a reload that loads nothing.
            own.weight_loader = self._unwrapped(own)  # pyright: ignore[reportAttributeAccessIssue]
        return own

    def loader_of(self, tensor: torch.Tensor) -> Any:
        """The weight loader that vLLM would call for a parameter."""
        return getattr(tensor, "weight_loader", self._default_loader)

    def materialised(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A poisoned tensor with storage, of the same class and attributes."""
        with device:
            real = self._meta.materialize_meta_tensor(tensor)
        poison(real)
        return real

    def stage_now(self, layer: torch.nn.Module) -> None:
        """Give a layer under reload its staging storage at once, for loaders that write without a weight loader."""
        self._meta.materialize_layer(layer, self._info(layer))

    def process(self, layer: torch.nn.Module) -> None:
        """Post-process a staged layer and copy the result into its live storage."""
        self._process(layer, self._info(layer))

    def unfinished(self, layer: torch.nn.Module) -> tuple[int, int] | None:
        """(values loaded, values wanted) of a layer under reload that was not processed yet; None if it was."""
        info = self._info(layer)
        return (info.load_numel, info.load_numel_total or 0) if info.can_load() else None

    def cancel(self, model: torch.nn.Module) -> None:
        """Put the old tensors back everywhere and forget what was staged; the weights are a mixture."""
        for layer in model.modules():
            info = self._info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                self._place(layer, info)
            info.reset()

    @contextmanager
    def poisoned_staging(self) -> Iterator[None]:
        """Inside, vLLM's staging buffers start as NaN instead of as whatever lay in memory."""
        original = self._meta.materialize_meta_tensor

        def materialize(tensor: torch.Tensor) -> torch.Tensor:
            real = original(tensor)
            poison(real)
            return real

        self._meta.materialize_meta_tensor = materialize
        try:
            yield
        finally:
            self._meta.materialize_meta_tensor = original


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN; with zeros where a tensor has padding that no checkpoint covers, which must be neutral."""
    padded = getattr(tensor, "weight_loader_numel", tensor.numel()) < tensor.numel()
    storage: Any = tensor.untyped_storage()
    storage.fill_(0 if padded else _POISON)


@contextmanager
def checkpoint_layout(model: torch.nn.Module, reload: LayerwiseReload) -> Iterator[dict[str, torch.Tensor]]:
    """Inside, the model's parameters and buffers are storage-less twins in checkpoint layout, by name; tied ones are
    one tensor. Outside, everything is as it was."""
    saved = [(layer, dict(layer._parameters), dict(layer._buffers)) for layer in model.modules()]
    twins: dict[str, torch.Tensor] = {}
    tied: dict[int, torch.Tensor] = {}
    try:
        for path, layer in model.named_modules():
            live = dict(layer._parameters)
            parameters, buffers = reload.loadable(layer)
            for name, twin in parameters.items():
                original = live.get(name)
                if original is not None and original.numel():
                    twin = tied.setdefault(id(original), twin)
                parameters[name] = twin
                twins[f"{path}.{name}" if path else name] = twin
            for name, twin in buffers.items():
                full = f"{path}.{name}" if path else name
                if name not in layer._non_persistent_buffers_set and full not in reload.layout_buffers:
                    twins[full] = twin
            absent = {name: None for name, tensor in live.items() if tensor is None}
            _replace(layer._parameters, {**absent, **parameters})
            _replace(layer._buffers, {**layer._buffers, **buffers})
        yield twins
    finally:
        for layer, parameters, buffers in saved:
            _replace(layer._parameters, parameters)
            _replace(layer._buffers, buffers)
            _forget_pending(layer)


def _replace(tensors: dict[str, Any], other: dict[str, Any]) -> None:
    tensors.clear()
    tensors.update(other)


def _forget_pending(layer: torch.nn.Module) -> None:
    """Some loaders keep half of a fused pair in a ``_pending…`` dictionary until the other half comes."""
    for name, value in vars(layer).items():
        if name.startswith("_pending") and isinstance(value, dict):
            value.clear()


def scratch_layer(layer: torch.nn.Module, reload: LayerwiseReload, device: torch.device) -> torch.nn.Module:
    """A copy of ``layer`` with its own empty (poisoned) parameters in checkpoint layout. Children are shared, but not a
    quantisation method, since that keeps kernels of its layer."""
    scratch = shallow_copy(layer)
    parameters, buffers = reload.loadable(layer)
    for name, twin in {**parameters, **buffers}.items():
        real = reload.materialised(twin, device)
        attributes: dict[str, Any] = vars(real)  # pyright: ignore[reportAssignmentType]
        for key, value in list(attributes.items()):
            if getattr(value, "__self__", None) is layer:
                attributes[key] = value.__func__.__get__(scratch)
        (scratch._parameters if name in parameters else scratch._buffers)[name] = real  # pyright: ignore[reportArgumentType]
    method = getattr(layer, "quant_method", None)
    if method is not None:
        fresh = shallow_copy(method)
        if hasattr(fresh, "moe_kernel"):
            fresh.moe_kernel = None  # else the post-processing would be skipped
        scratch.quant_method = fresh
    return scratch


def shallow_copy(thing: Any) -> Any:
    """A copy of an object that shares attributes but not a module's dictionaries. Not ``copy.copy``: vLLM's classes
    choose a class in ``__new__``."""
    copied = object.__new__(type(thing))
    copied.__dict__.update(thing.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        if name in copied.__dict__:
            copied.__dict__[name] = dict(copied.__dict__[name])
    return copied
