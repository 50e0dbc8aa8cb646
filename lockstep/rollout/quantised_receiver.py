"""A refit of quantised weights into the embedded engine, which computes with them dequantised.

The codes and scales that arrive are turned back into the engine's own dtype and copied into its live storage, so the
engine computes what a kernel for quantised weights would compute with exact products, and its agreement with an
unquantised trainer shows what the format costs. What the engine holds is therefore compared with the dequantised source
(``refit/verify.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from lockstep.numerics.blocks import QuantisationError, Quantised
from lockstep.numerics.pairs import dequantise, plain_manifest
from lockstep.records import DerivedReport, Manifest, Quantisation, TensorSpec
from lockstep.rollout.decoding import Decoder
from lockstep.rollout.receiver import RefitHost, RefitRefused, TorchReceiver, dtype_name


class QuantisedReceiver(TorchReceiver):
    """A ``TorchReceiver`` for manifests of one scheme (``rollout.quantisation``); with "none" it takes plain ones."""

    def __init__(self, model: torch.nn.Module, decoder: Decoder, host: RefitHost, scheme: Quantisation) -> None:
        super().__init__(model, decoder, host)
        self._scheme: Quantisation = scheme
        self._sent: dict[str, TensorSpec] = {}
        self._weight_of: dict[str, str] = {}
        self._halves: dict[str, dict[str, torch.Tensor]] = {}  # by weight: what came without its other half

    @property
    def quantisation(self) -> Quantisation:
        """The scheme of the manifests that it takes."""
        return self._scheme

    def begin(self, manifest: Manifest) -> None:
        """As ``TorchReceiver.begin``; also refuses another scheme than the engine's, half a pair, and scales of the
        wrong shape. Nothing has moved then."""
        if manifest.quantisation != self._scheme:
            raise RefitRefused(
                f"manifest of version {manifest.version} is quantised {manifest.quantisation!r}, this engine serves "
                f"{self._scheme!r} (rollout.quantisation)"
            )
        try:
            plain = plain_manifest(manifest)
        except QuantisationError as error:
            raise RefitRefused(str(error)) from error
        super().begin(plain)
        self._sent = {spec.name: spec for spec in manifest.tensors}
        pairs = [spec for spec in manifest.tensors if spec.scale]
        self._weight_of = {name: spec.name for spec in pairs for name in (spec.name, spec.scale)}
        self._halves = {}

    def receive(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors into the live storage, quantised ones dequantised. A half of a pair waits for the other one."""
        super().receive(self._dequantised(tensors))
        for pair in self._halves.values():  # what a caller gives is valid during the call only
            pair.update({name: tensor.clone() for name, tensor in pair.items()})

    def alias(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As ``TorchReceiver.alias``. Raises RefitRefused for quantised tensors, which the engine holds in another form
        than they travel in."""
        super().alias(self._plain(tensors))

    def commit(self) -> tuple[DerivedReport, ...]:
        """As ``TorchReceiver.commit``. Raises if half a pair never arrived."""
        if self._halves:
            missing = "; ".join(
                f"{half} without {self._other(weight, half)}" for weight, pair in self._halves.items() for half in pair
            )
            self.abort(f"half a pair: {missing}")
            raise RefitRefused(f"half a pair: {missing}")
        return super().commit()

    def _plain(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            if name in self._weight_of:
                raise RefitRefused(f"{name} is quantised and can't be shared: copy it (refit.transport)")
            yield name, tensor

    def _dequantised(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            weight = self._weight_of.get(name)
            if weight is None:
                yield name, tensor
                continue
            self._check_half(name, tensor)
            pair = self._halves.setdefault(weight, {})
            if name in pair:
                raise RefitRefused(f"{name} arrived twice")
            pair[name] = tensor
            if len(pair) == 2:
                del self._halves[weight]
                spec = self._sent[weight]
                yield weight, dequantise(spec, Quantised(pair[weight], pair[spec.scale]))

    def _other(self, weight: str, half: str) -> str:
        scale = self._sent[weight].scale
        return scale if half == weight else weight

    def _check_half(self, name: str, tensor: torch.Tensor) -> None:
        spec = self._sent[name]
        if tuple(tensor.shape) != spec.shape or dtype_name(tensor) != spec.dtype:
            raise RefitRefused(
                f"{name} arrived as {dtype_name(tensor)} {tuple(tensor.shape)}, "
                f"its manifest says {spec.dtype} {spec.shape}"
            )
