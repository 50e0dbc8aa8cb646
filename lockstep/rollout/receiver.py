"""The embedded engine's side of a refit: what a manifest must cover, the copy into live storage, and the commit.

Names are those of the module's ``state_dict``: parameters and persistent buffers (router biases and the like are
policy state); layout buffers that are not persistent never travel. A storage shared by several names (a tied head) is
one *live weight* and is covered by any one of its names.

``begin`` compares both ways before a byte moves: every tensor of the manifest must have a live weight of its shape, and
every live weight must be covered, once. A declared subset (``base_version``) may leave weights out, and is refused
unless exactly its base is what the engine holds whole. A tensor's dtype must be the live one; the single exception is a
float32 tensor for a bfloat16 weight, which is rounded on arrival (the policy is then the rounded weights).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from lockstep.records import DerivedReport, Manifest, Naming, Quantisation, TensorSpec
from lockstep.rollout.decoding import Decoder
from lockstep.stream_copy import stream_copy


class RefitRefused(ValueError):
    """A manifest or a tensor that this engine can't take; the text lists every problem by name."""


class RefitHost(Protocol):
    """What a receiver tells its engine, and asks it."""

    @property
    def version(self) -> int:
        """Policy version of the weights that it serves."""
        ...

    def refit_begun(self) -> None:
        """Stop admission and put running requests back in the queue."""
        ...

    def refit_committed(self, version: int) -> None:
        """Take up the new version and drop caches. It may be scored; requests wait until ``refit_over``."""
        ...

    def refit_over(self) -> None:
        """Admit requests again: the new version was found to be right."""
        ...

    def refit_aborted(self, reason: str) -> None:
        """The weights may be a mixture: serve nothing until a refit commits."""
        ...


@dataclass(frozen=True, slots=True)
class LiveWeight:
    """One storage of the module and every name that it goes by, in state-dict order."""

    names: tuple[str, ...]
    tensor: torch.Tensor


def live_weights(model: torch.nn.Module) -> list[LiveWeight]:
    """The module's distinct parameters and persistent buffers, tied names together, in state-dict order."""
    names: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    tensors: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        # An empty tensor has no storage to tell it by.
        key = (tensor.data_ptr() if tensor.numel() else id(tensor), tuple(tensor.shape))
        names.setdefault(key, []).append(name)
        tensors[key] = tensor
    return [LiveWeight(tuple(names[key]), tensors[key]) for key in names]


def dtype_name(tensor: torch.Tensor) -> str:
    """A manifest's word for a dtype: ``bfloat16``, ``float32``, …"""
    return _word(tensor.dtype)


@cache
def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plan_coverage(live: list[LiveWeight], manifest: Manifest) -> dict[str, list[LiveWeight]]:
    """Which live weights each tensor of the manifest fills. Raises RefitRefused with every problem."""
    problems: list[str] = []
    specs: dict[str, TensorSpec] = {}
    for spec in manifest.tensors:
        if spec.name in specs:
            problems.append(f"doubled: {spec.name} is twice in the manifest")
        specs[spec.name] = spec
    targets: dict[str, list[LiveWeight]] = {name: [] for name in specs}
    for weight in live:
        sources = [name for name in weight.names if name in specs]
        if not sources:
            # The engine keeps apart what the source ties: the one tensor that travels fills both.
            tied = {manifest.tied[name] for name in weight.names if name in manifest.tied}
            sources = sorted(tied & specs.keys())
        if not sources and manifest.base_version is None:
            problems.append(f"missing: {weight.names[0]} {tuple(weight.tensor.shape)} is not in the manifest")
        elif len(sources) > 1:
            problems.append(f"doubled: {' and '.join(sources)} are one tied weight here")
        elif sources:
            targets[sources[0]].append(weight)
            problems.extend(_misfit(specs[sources[0]], weight.tensor))
    known = {name for weight in live for name in weight.names}
    problems.extend(f"extra: {name} is unknown to this model" for name in specs if name not in known)
    problems.extend(
        f"tied: {name} → {first}, which does not travel" for name, first in manifest.tied.items() if first not in specs
    )
    if problems:
        raise RefitRefused(
            f"manifest of version {manifest.version} refused, {len(problems)} problem(s): " + "; ".join(problems)
        )
    return targets


def _misfit(spec: TensorSpec, tensor: torch.Tensor) -> list[str]:
    problems = []
    if spec.shape != tuple(tensor.shape):
        problems.append(f"shape: {spec.name} is {spec.shape}, the engine's is {tuple(tensor.shape)}")
    live = dtype_name(tensor)
    if spec.dtype != live and (spec.dtype, live) != ("float32", "bfloat16"):
        problems.append(f"dtype: {spec.name} is {spec.dtype}, the engine's is {live}")
    return problems


def arriving(
    name: str, tensor: torch.Tensor, specs: Mapping[str, TensorSpec], received: set[str], version: int
) -> TensorSpec:
    """What the manifest says of a tensor that arrives. Raises RefitRefused unless it is one of ``specs``, comes for the
    first time, and has its shape and dtype."""
    spec = specs.get(name)
    if spec is None:
        raise RefitRefused(f"{name} arrived but is not in the manifest of version {version}")
    if name in received:
        raise RefitRefused(f"{name} arrived twice")
    if tensor.shape != spec.shape or _word(tensor.dtype) != spec.dtype:
        raise RefitRefused(
            f"{name} arrived as {dtype_name(tensor)} {tuple(tensor.shape)}, its manifest says {spec.dtype} {spec.shape}"
        )
    return spec


class TorchReceiver:
    """``interfaces.WeightReceiver`` of a ``TorchEngine``. One refit at a time."""

    def __init__(self, model: torch.nn.Module, decoder: Decoder, host: RefitHost) -> None:
        self._model = model
        self._decoder = decoder
        self._host = host
        self._manifest: Manifest | None = None
        self._targets: dict[str, list[LiveWeight]] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._received: set[str] = set()
        self._whole = True  # no refit broke off since the weights were last complete
        self._aliased: set[int] = set()  # ids of live tensors that have someone else's storage

    def begin(self, manifest: Manifest) -> None:
        """Check the manifest both ways, then stop admission. Raises RefitRefused and leaves the engine as it was."""
        if self._manifest is not None:
            raise RuntimeError(f"a refit to version {self._manifest.version} has begun and is not over")
        self._check_base(manifest)
        self._targets = plan_coverage(live_weights(self._model), manifest)
        self._specs = {spec.name: spec for spec in manifest.tensors}
        self._received = set()
        self._manifest = manifest
        try:
            self._host.refit_begun()
        except BaseException as error:
            self.abort(f"version {manifest.version} could not be begun: {error}")
            raise

    def receive(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors into the live storage. May be called several times (buckets)."""
        self._take_all(tensors, alias=False)

    def alias(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Make the live parameters and buffers share the given storage; dtypes must be equal."""
        self._take_all(tensors, alias=True)

    @property
    def naming(self) -> Naming:
        """The embedded engine runs transformers' modules: their names are its own."""
        return "module"

    @property
    def quantisation(self) -> Quantisation:
        """Plain weights."""
        return "none"

    def commit(self) -> tuple[DerivedReport, ...]:
        """Rebuild derived weights, drop caches, take up the new version. Raises if a tensor never arrived."""
        manifest = self._begun()
        absent = [name for name in self._specs if name not in self._received]
        if absent:
            self.abort(f"{len(absent)} tensor(s) never arrived")
            raise RefitRefused(f"refit to version {manifest.version}: never arrived: {', '.join(absent)}")
        try:
            self._decoder.refresh()
        except Exception as error:
            self.abort(f"derived weights could not be rebuilt: {error}")
            raise
        self._manifest = None
        self._whole = True
        self._host.refit_committed(manifest.version)
        return ()

    def resume(self) -> None:
        """Admit requests again."""
        self._host.refit_over()

    def abort(self, reason: str) -> None:
        """Give up: the engine serves nothing until a refit commits."""
        self._manifest = None
        self._whole = False
        self._host.refit_aborted(reason)

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the engine computes with: each live weight once under its first name, taken from the decoder's own
        layout where it has one; a tied name as well where the decoder keeps a layout of its own for it (the head)."""
        own = dict(self._decoder.live())
        for weight in live_weights(self._model):
            yield weight.names[0], own.pop(weight.names[0], weight.tensor.detach())
        yield from own.items()

    def opaque(self) -> dict[str, str]:
        """Nothing: every layout of this engine can be undone."""
        return {}

    def reload_differences(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, str | None]]:
        """Nothing to load again: see ``opaque``."""
        return iter(())

    def derived(self) -> tuple[DerivedReport, ...]:
        """No registered state: what the decoder derives is part of ``live``."""
        return ()

    def _check_base(self, manifest: Manifest) -> None:
        """A declared subset lies over its own base only."""
        if manifest.base_version is None:
            return
        subset = f"manifest of version {manifest.version} refused: it is a subset over version {manifest.base_version}"
        if not self._whole:
            raise RefitRefused(f"{subset}, and a refit broke off here: the engine needs a full one")
        if manifest.base_version != self._host.version:
            raise RefitRefused(f"{subset}, the engine holds version {self._host.version}")

    def _begun(self) -> Manifest:
        if self._manifest is None:
            raise RuntimeError("no refit has begun: call begin(manifest) first")
        return self._manifest

    def _take_all(self, tensors: Iterable[tuple[str, torch.Tensor]], *, alias: bool) -> None:
        manifest = self._begun()
        try:
            with torch.no_grad():
                for name, tensor in tensors:
                    self._check(manifest, name, tensor, alias)
                    for weight in self._targets[name]:
                        if alias:
                            weight.tensor.data = tensor.detach()
                            self._aliased.add(id(weight.tensor))
                            continue
                        if id(weight.tensor) in self._aliased:  # a copy must not go into the trainer's own weights
                            weight.tensor.data = torch.empty_like(weight.tensor)
                            self._aliased.discard(id(weight.tensor))
                        stream_copy(weight.tensor, tensor)
                    self._received.add(name)
        except BaseException as error:
            self.abort(f"the transfer of version {manifest.version} broke off: {error}")
            raise

    def _check(self, manifest: Manifest, name: str, tensor: torch.Tensor, alias: bool) -> None:
        spec = arriving(name, tensor, self._specs, self._received, manifest.version)
        if alias:
            for weight in self._targets[name]:
                if weight.tensor.dtype != tensor.dtype:
                    raise RefitRefused(
                        f"{name} can't be shared: {spec.dtype} there, {dtype_name(weight.tensor)} here; copy it instead"
                    )
