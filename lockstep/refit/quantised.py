"""A trainer's weights as quantised ones, and back: wrappers of a weight source.

trainer.weights() ─▶ quantised(·, scheme) ─▶ manifest with codes and scales ─▶ engine
                                         └─▶ dequantised(·) ─▶ what an engine that dequantises must hold (verify)

The trainer keeps its float32 or bfloat16 weights; only what travels is quantised, tensor by tensor, by the table of
``quantised_names.py``. Codes and scales of a weight follow each other in its atomic group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

import torch

from lockstep.interfaces import DescribesLive, WeightReceiver, WeightSource
from lockstep.numerics.blocks import QuantisationError, Quantised
from lockstep.numerics.pairs import Format, dequantise, plain_manifest, quantise, quantised_specs
from lockstep.records import Manifest, Quantisation, TensorSpec
from lockstep.refit.quantised_names import check_scheme, form_of, scale_name
from lockstep.refit.transports import whole_tensors
from lockstep.rollout.receiver import dtype_name

Shard = tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]


def quantised(source: WeightSource, scheme: Quantisation) -> WeightSource:
    """``source`` (in module or checkpoint names) with its linears or experts quantised by ``scheme``; itself for
    "none".

    Raises QuantisationError if the model's family is unknown, if it has nothing that the scheme quantises, if a name is
    in no row of its table, or if it is quantised already.
    """
    if scheme == "none":
        return source
    manifest = source.manifest()
    if manifest.quantisation != "none":
        raise QuantisationError(f"the source is quantised already: {manifest.quantisation}")
    check_scheme(manifest.model_type, scheme)
    return QuantisedWeights(source, scheme)


def quantised_for(source: WeightSource, scheme: Quantisation) -> WeightSource:
    """``source`` as a receiver of ``scheme`` takes it; one that is quantised already is left as it is, for the receiver
    to judge. Raises QuantisationError as ``quantised`` does."""
    return source if source.manifest().quantisation != "none" else quantised(source, scheme)


def served_weights(source: WeightSource, scheme: Quantisation) -> WeightSource:
    """The weights that an engine of ``scheme`` computes with once it is refitted with ``source``, in float32 where they
    were quantised: what a reference has to hold to agree with it."""
    return source if scheme == "none" else dequantised(quantised_for(source, scheme))


class QuantisedWeights:
    """``interfaces.WeightSource`` over another one. Reads its tensors anew at every call: they may be live."""

    def __init__(self, source: WeightSource, scheme: Quantisation) -> None:
        self._source = source
        self._scheme: Quantisation = scheme

    def manifest(self) -> Manifest:
        """Codes and scales in place of each quantised weight. Raises QuantisationError for a shape without blocks."""
        plain = self._source.manifest()
        specs: list[TensorSpec] = []
        for spec in plain.tensors:
            form = self._form(plain, spec.name)
            if form is None:
                specs.append(spec)
            else:
                specs += quantised_specs(spec, form, scale_name(plain.model_type, plain.naming, spec.name))
        return Manifest(
            version=plain.version,
            tensors=tuple(specs),
            tied=plain.tied,
            model_type=plain.model_type,
            naming=plain.naming,
            base_version=plain.base_version,
            quantisation=self._scheme,
        )

    def shards(self) -> Iterator[Shard]:
        """Whole tensors. Raises QuantisationError for one that is not finite, ValueError for a shard of one."""
        plain = self._source.manifest()
        for name, tensor in whole_tensors(self._source):
            form = self._form(plain, name)
            if form is None:
                yield _whole(name, tensor)
            else:
                pair = quantise(tensor, form, name)
                yield _whole(name, pair.values)
                yield _whole(scale_name(plain.model_type, plain.naming, name), pair.scale)

    def _form(self, manifest: Manifest, name: str) -> Format | None:
        return form_of(manifest.model_type, self._scheme, name)


def dequantised(source: WeightSource, names: AbstractSet[str] | None = None) -> WeightSource:
    """A quantised source with its weights, or those of ``names``, dequantised to float32."""
    return _Dequantised(source, names)


def held_dequantised(manifest: Manifest, live: Mapping[str, str]) -> set[str]:
    """Quantised weights of a manifest that an engine shows (``live``: ``live_dtypes``) in another dtype than their
    codes have: it dequantised them at loading."""
    codes = {spec.name: spec.dtype for spec in manifest.tensors if spec.scale}
    return {name for name, dtype in live.items() if name in codes and dtype != codes[name]}


def as_held(source: WeightSource, receiver: WeightReceiver) -> WeightSource:
    """``source`` in the form in which an engine shows it, for comparison: see ``held_dequantised``."""
    manifest = source.manifest()
    if manifest.quantisation == "none":
        return source
    return dequantised(source, held_dequantised(manifest, live_dtypes(receiver)))


def live_dtypes(receiver: WeightReceiver) -> dict[str, str]:
    """Dtypes (torch's words) of what an engine shows, by name; no tensor of another process travels for them."""
    if isinstance(receiver, DescribesLive):
        return {live.name: live.dtype for live in receiver.described(None)}
    return {name: dtype_name(live) for name, live in receiver.live()}


class _Dequantised:
    def __init__(self, source: WeightSource, names: AbstractSet[str] | None) -> None:
        self._source, self._names = source, names

    def manifest(self) -> Manifest:
        manifest = self._source.manifest()
        plain = {spec.name: spec for spec in plain_manifest(manifest).tensors}
        chosen = self._chosen(manifest)
        scales = {spec.scale for spec in chosen.values()}
        specs = tuple(
            plain[spec.name] if spec.name in chosen else spec for spec in manifest.tensors if spec.name not in scales
        )
        rest = "none" if not any(spec.scale for spec in specs) else manifest.quantisation
        return Manifest(
            manifest.version, specs, manifest.tied, manifest.model_type, manifest.naming, manifest.base_version, rest
        )

    def shards(self) -> Iterator[Shard]:
        chosen = self._chosen(self._source.manifest())
        weight_of = {name: spec for spec in chosen.values() for name in (spec.name, spec.scale)}
        waiting: dict[str, torch.Tensor] = {}
        for name, tensor in whole_tensors(self._source):
            spec = weight_of.get(name)
            if spec is None:
                yield _whole(name, tensor)
                continue
            waiting[name] = tensor
            if spec.name in waiting and spec.scale in waiting:
                pair = Quantised(waiting.pop(spec.name), waiting.pop(spec.scale))
                yield _whole(spec.name, dequantise(spec, pair))
        if waiting:
            raise QuantisationError(f"half a pair: {', '.join(sorted(waiting))} came without its other half")

    def _chosen(self, manifest: Manifest) -> dict[str, TensorSpec]:
        names = self._names
        return {spec.name: spec for spec in manifest.tensors if spec.scale and (names is None or spec.name in names)}


def _whole(name: str, tensor: torch.Tensor) -> Shard:
    return name, tuple(tensor.shape), (0,) * tensor.ndim, tensor
