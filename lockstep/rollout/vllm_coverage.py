"""Where would a manifest's tensors go? The engine's own loader is asked, with tensors that have no storage.

An engine's loader ignores what it doesn't know and reports success, so a manifest is proved before a byte moves: every
name must be written somewhere, and every value of every live parameter and policy buffer must be written, once.

manifest ──storage-less tensors──▶ model.load_weights ──writes──▶ storage-less parameters
                                                         └─ recorded here: which name, which part of which parameter
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
"""A view of a tensor: size, stride and offset in elements."""

MAX_ERRORS = 8
"""Tensors at which a loader may raise before the dry run gives up looking for more."""


@dataclass(frozen=True, slots=True)
class Write:
    """One tensor of the manifest going into one part of a live tensor.

    ``source`` is the part of the manifest's tensor that was copied, None where the loader computed something of it
    (a transposed copy, a conversion, a function of what it had written). ``through_loader`` False: written without the
    parameter's weight loader, which a layer-wise reload can't see.
    """

    target: str
    region: Geometry
    source: Geometry | None
    through_loader: bool


@dataclass(slots=True)
class DryLoad:
    """What the loader did with each name."""

    writes: dict[str, list[Write]] = field(default_factory=lambda: defaultdict(list))
    offered: set[str] = field(default_factory=set)  # reached a weight loader, which may have declined (other rank)
    padding: dict[str, set[Geometry]] = field(default_factory=lambda: defaultdict(set))  # constants, by target
    problems: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # at which the loader raised, and what
    complete: bool = True  # False: the loader raised too often to see the rest


class _Recorder(TorchDispatchMode):
    """Sees every operation of a load; writes into targets are noted and not done."""

    def __init__(self, targets: Mapping[str, torch.Tensor], result: DryLoad) -> None:
        super().__init__()
        self._targets: dict[int, str] = {}
        for name, tensor in targets.items():  # a tied one goes by its first name
            self._targets.setdefault(_storage(tensor), name)
        self._origin: dict[int, tuple[str, bool]] = {}  # storage → (manifest name, is it the manifest's own tensor)
        self._alive: list[torch.Tensor] = []  # a freed storage's address may come again
        self._made: set[int] = set()  # storages that this load made: scratch of the loader
        self._computed: dict[int, str] = {}  # scratch that was computed from a target: storage → target
        self._result = result
        self._in_loader = 0
        self.current = ""

    def source(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Announce a tensor of the manifest."""
        self.current = name
        self._alive.append(tensor)
        self._origin[_storage(tensor)] = (name, True)
        return tensor

    def watched(self, loader: Callable[..., Any]) -> Callable[..., Any]:
        """A weight loader whose calls are noted."""

        def weight_loader(*args: Any, **kwargs: Any) -> Any:
            self._result.offered.update(name for name, _ in self._origins((args, kwargs)))
            self._in_loader += 1
            try:
                return loader(*args, **kwargs)
            finally:
                self._in_loader -= 1

        return weight_loader

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[index] if index < len(args) else kwargs.get(argument.name)
            if isinstance(written, torch.Tensor) and self._takes(func, written, args, kwargs):
                return written
        out = func(*args, **kwargs)
        origins = self._origins((args, kwargs))
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor) and _storage(made) not in given:
                self._alive.append(made)
                self._made.add(_storage(made))
                if origins:
                    self._origin[_storage(made)] = (origins[0][0], False)
                for storage in given:
                    if (target := self._targets.get(storage) or self._computed.get(storage)) is not None:
                        self._computed[_storage(made)] = target
        return out

    def _takes(self, func: Any, written: torch.Tensor, args: Any, kwargs: Any) -> bool:
        """Note a write; True if it must not be done."""
        target = self._targets.get(_storage(written))
        if target is None:
            if _storage(written) in self._made:
                return False
            self._result.problems.append(f"{self.current}: the loader writes into a tensor that is no parameter")
            return True
        value = args[1] if func.overloadpacket is torch.ops.aten.copy_ else None
        origins = self._origins(([value] if value is not None else [a for a in args if a is not written], kwargs))
        if not origins:
            if self._transforms(func, target, value):
                self._transformed(target)
            else:
                self._result.padding[target].add(_geometry(written))
            return True
        name, own = origins[0]
        if isinstance(value, torch.Tensor) and value.squeeze().shape != written.squeeze().shape:
            # Refused even where broadcasting would do: one value spread over many is no weight.
            self._result.problems.append(
                f"shape: {name}: {tuple(value.shape)} does not fit into {tuple(written.shape)} of {target}"
            )
        source = _geometry(value) if own and isinstance(value, torch.Tensor) else None
        self._result.writes[name].append(Write(target, _geometry(written), source, self._in_loader > 0))
        return True

    def _transforms(self, func: Any, target: str, value: Any) -> bool:
        """Whether a write that brings no tensor of the manifest changes what the target holds (a composed loader:
        ``param.copy_(fn(param))``) instead of filling a constant in."""
        if isinstance(value, torch.Tensor):
            return self._computed.get(_storage(value)) == target or self._targets.get(_storage(value)) == target
        return func.overloadpacket not in (torch.ops.aten.fill_, torch.ops.aten.zero_, torch.ops.aten.copy_)

    def _transformed(self, target: str) -> None:
        """What was written into ``target`` is no longer what was sent."""
        for name, writes in self._result.writes.items():
            self._result.writes[name] = [replace(w, source=None) if w.target == target else w for w in writes]

    def _origins(self, values: Any) -> list[tuple[str, bool]]:
        found = [self._origin.get(_storage(leaf)) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
        return [origin for origin in found if origin is not None]


def dry_load(
    load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
    targets: Mapping[str, torch.Tensor],
    loader_of: Callable[[torch.Tensor], Any],
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> DryLoad:
    """Offer ``tensors`` to the loader and note what it would write into ``targets`` (storage-less twins that are the
    model's parameters at this moment)."""
    refused: dict[str, str] = {}
    while True:
        result = DryLoad()
        recorder = _Recorder(targets, result)
        names = [name for name in tensors if name not in refused]
        originals = {name: (twin, loader_of(twin)) for name, twin in targets.items()}
        for twin, loader in originals.values():
            twin.weight_loader = recorder.watched(loader)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with torch.no_grad(), recorder:
                load_weights(_offered(recorder, names, tensors))
        except Exception as error:
            known = recorder.current in refused
            refused[recorder.current] = _short(error)
            if not known and len(refused) < MAX_ERRORS:
                continue
            result.complete = False
        finally:
            for twin, loader in originals.values():
                twin.weight_loader = loader  # pyright: ignore[reportAttributeAccessIssue]
        result.refused = refused
        return result


def _offered(
    recorder: _Recorder, names: Iterable[str], tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        shape, dtype = tensors[name]
        yield name, recorder.source(name, torch.empty(shape, dtype=dtype, device="meta"))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _geometry(tensor: torch.Tensor) -> Geometry:
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no reason given"
    return f"{type(error).__name__}: {text[:200]}"


def num_covered(tensor: torch.Tensor, geometries: Iterable[Geometry]) -> int:
    """Values of ``tensor`` that lie in at least one of the views of it."""
    seen = torch.zeros(tensor.numel(), dtype=torch.bool)
    for size, stride, offset in geometries:
        seen.as_strided(size, stride, offset).fill_(True)
    return int(seen.sum())


def numel(geometry: Geometry) -> int:
    """Number of values in a view."""
    count = 1
    for size in geometry[0]:
        count *= size
    return count
