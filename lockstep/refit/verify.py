"""The claims of a refit's receipt: what was looked at after the commit, and what was found.

A claim is ``held``, ``failed`` or ``not checked``, each with the reason; nothing is claimed that was not looked at.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from lockstep.interfaces import DescribesLive, WeightReceiver, WeightSource
from lockstep.numerics.row_sums import tensor_digest
from lockstep.records import Claim, Manifest
from lockstep.refit.derived import equal_bits
from lockstep.refit.quantised import as_held, held_dequantised, live_dtypes
from lockstep.refit.transports import whole_tensors


def claim_covered(manifest: Manifest, receiver: WeightReceiver) -> Claim:
    """Every manifest name has a live tensor and every live tensor is of the manifest, counted both ways. The block
    scales of a weight that is live dequantised are in it."""
    sent = {spec.name for spec in manifest.tensors}
    shown = live_dtypes(receiver)
    live = shown.keys() | receiver.opaque().keys()
    dequantised = held_dequantised(manifest, shown)
    folded = {spec.scale for spec in manifest.tensors if spec.name in dequantised}
    missing, extra = sorted(sent - live - folded), sorted(live - sent - set(manifest.tied))
    if manifest.base_version is not None:
        extra = []  # a declared subset leaves the rest as its base has it
    if missing or extra:
        return Claim("covered", "failed", f"not live after the refit: {missing[:5]}; live but not sent: {extra[:5]}")
    into = f" ({len(folded)} of them block scales, now in their weights)" if folded else ""
    return Claim("covered", "held", f"{len(sent)} tensors sent{into}, {len(live)} live")


def claim_loaded(manifest: Manifest, source: WeightSource, receiver: WeightReceiver) -> Claim:
    """Live tensors of the engine, tied copies with a layout of their own included, equal the trainer's byte for byte
    after the conversion to the engine's dtype (in another process by their digests, under a key made for this look);
    those in a layout that can't be undone equal a second load. Weights that the engine dequantised equal the
    dequantisation of the quantised source."""
    expected = dict(whole_tensors(as_held(source, receiver)))
    num_bytes = num_tensors = 0
    for live in _live(receiver):
        name = live.name
        sent = name if name in expected else manifest.tied.get(name)
        if sent is None and manifest.base_version is not None:
            continue  # not of the declared subset
        if sent is None:
            return Claim("loaded", "failed", f"{name}: live in the engine, unknown to the trainer")
        wanted = expected[sent].detach().to(live.dtype)
        if tuple(wanted.shape) != live.shape:
            return Claim("loaded", "failed", f"{name}: shape {live.shape}, trainer has {tuple(wanted.shape)}")
        if not live.equals(wanted):
            differing = _num_differing(wanted, next(found for one, found in receiver.live() if one == name))
            return Claim(
                "loaded", "failed", f"{name}: {differing} of {wanted.numel()} values differ from the trainer's"
            )
        num_tensors += 1
        num_bytes += wanted.nbytes
    opaque = receiver.opaque()
    seen: set[str] = set()
    for name, difference in receiver.reload_differences((name, expected[name]) for name in opaque if name in expected):
        if difference is not None:
            return Claim("loaded", "failed", f"{name}: {difference}")
        seen.add(name)
    if unseen := sorted(opaque.keys() - seen):
        return Claim("loaded", "failed", f"{len(unseen)} opaque tensors were not loaded again: {unseen[:5]}")
    if num_tensors + len(seen) == 0:
        return Claim("loaded", "failed", "the engine shows no live tensor")
    how = " by digest" if isinstance(receiver, DescribesLive) else ""
    again = f"; {len(seen)} in a kernel's layout equal a second load" if seen else ""
    return Claim("loaded", "held", f"{num_tensors} tensors, {num_bytes} bytes equal{how}{again}")


def claim_derived(receiver: WeightReceiver) -> Claim:
    """Every registered derived state equals a rebuild from the live weights."""
    reports = receiver.derived()
    if stale := [report for report in reports if report.num_changed]:
        detail = "; ".join(f"{one.entry}: {one.num_changed} of {one.num_states} differ {one.detail}" for one in stale)
        return Claim("derived", "failed", detail)
    looked_at = [report for report in reports if report.num_states]
    if not looked_at:
        return Claim("derived", "not checked", "this engine has no registered derived state")
    return Claim("derived", "held", ", ".join(f"{one.entry} {one.num_states}" for one in looked_at))


@dataclass(frozen=True, slots=True)
class _Live:
    """One live tensor, here or elsewhere. ``equals``: whether another of its dtype and shape has its very bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    equals: Callable[[torch.Tensor], bool]


def _live(receiver: WeightReceiver) -> Iterator[_Live]:
    if not isinstance(receiver, DescribesLive):
        for name, live in receiver.live():
            yield _Live(name, live.dtype, tuple(live.shape), partial(_same_bits, live))
        return
    key = secrets.randbits(64)
    for live in receiver.described(key):
        dtype = getattr(torch, live.dtype)
        yield _Live(live.name, dtype, live.shape, partial(_same_digest, live.digest, key))


def _same_bits(live: torch.Tensor, wanted: torch.Tensor) -> bool:
    return equal_bits(wanted.to(live.device), live)


def _same_digest(digest: str | None, key: int, wanted: torch.Tensor) -> bool:
    return digest == tensor_digest(wanted, key)


def _num_differing(wanted: torch.Tensor, live: torch.Tensor) -> int:
    return int((_bits(wanted.to(live.device)) != _bits(live)).sum())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers, so that NaN equals itself and −0 differs from 0."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(integer)
