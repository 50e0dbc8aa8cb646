"""A refit as a transaction: begin → transfer → commit → verify → resume; a failure aborts, and the engine is unfit.

trainer.weights() ──manifest──▶ receiver.begin      refuses by name before a byte moves
                  ──tensors───▶ transport ─▶ receiver.receive | alias
                                receiver.commit     derived state rebuilt, caches dropped, version raised
                  ◀──live────── verify              claims of the receipt
                                receiver.resume     requests are admitted again
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from lockstep.interfaces import WeightReceiver, WeightSource
from lockstep.numerics.blocks import QuantisationError
from lockstep.records import Claim, DerivedReport, Manifest
from lockstep.refit.names import NameMapError, named_for
from lockstep.refit.quantised import quantised_for
from lockstep.refit.transports import Transport
from lockstep.refit.verify import claim_covered, claim_derived, claim_loaded
from lockstep.spans import span

logger = logging.getLogger(__name__)


class RefitError(RuntimeError):
    """A refit that failed; the engine is unfit until a full refit commits. ``receipt``: what was found, if a claim
    failed; None where it broke off before."""

    def __init__(self, message: str, receipt: Receipt | None = None) -> None:
        super().__init__(message)
        self.receipt = receipt


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one refit of one replica did and which of its claims were checked (a line of ``refits.jsonl``)."""

    version: int
    transport: str
    num_tensors: int
    num_buckets: int
    transferred_bytes: int
    begin_s: float
    transfer_s: float
    commit_s: float
    verify_s: float
    claims: tuple[Claim, ...]
    derived: tuple[DerivedReport, ...] = ()
    same_bytes_as: int | None = None
    """An earlier version that travelled with the very same bytes; None also where no digests are made (``local``)."""

    @property
    def failed(self) -> tuple[Claim, ...]:
        """Claims that were looked at and did not hold."""
        return tuple(claim for claim in self.claims if claim.status == "failed")

    @property
    def transfer_bytes_per_s(self) -> float | None:
        """Rate of the transfer phase; None where nothing moved (an alias)."""
        return self.transferred_bytes / self.transfer_s if self.transferred_bytes and self.transfer_s else None

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        rate = self.transfer_bytes_per_s
        plain: dict[str, object] = {**asdict(self), "replicas": 1}
        return plain if rate is None else plain | {"transfer_bytes_per_s": rate}


def run_refit(
    source: WeightSource,
    receiver: WeightReceiver,
    transport: Transport,
    *,
    verify: bool,
    behaves: Callable[[], Claim] | None = None,
) -> Receipt:
    """Give an engine the trainer's weights.

    Raises RefitError with the cause. If the manifest is refused, the engine is as it was; if a later phase fails or a
    checked claim does not hold, it serves nothing until a refit commits. Requests are admitted again when the claims
    were checked, not before. Without ``verify`` the claims are recorded as not checked. ``behaves`` scores probes on
    both sides after the commit; None leaves that claim to the gate.
    """
    source = _as_the_engine_reads(source, receiver)
    manifest = source.manifest()
    clock = _PhaseClock()
    try:
        with span("refit/begin"), clock("begin"):
            receiver.begin(manifest)
    except Exception as error:  # nothing has moved: the engine is as it was
        raise RefitError(f"refit to version {manifest.version} refused: {error}") from error
    try:
        with span("refit/transfer"), clock("transfer"):
            moved = transport.transfer(source, receiver)
        with span("refit/commit"), clock("commit"):
            derived = receiver.commit()
        with span("refit/verify"), clock("verify"):
            claims = _claims(manifest, source, receiver, moved.transported, verify=verify, behaves=behaves)
    except BaseException as error:
        beside = _aborted(receiver, f"{type(error).__name__}: {error}")
        if isinstance(error, Exception):
            raise RefitError(f"refit to version {manifest.version} failed: {error}{beside}") from error
        raise
    receipt = Receipt(
        version=manifest.version,
        transport=transport.name,
        num_tensors=len(manifest.tensors),
        num_buckets=moved.num_buckets,
        transferred_bytes=moved.num_bytes,
        begin_s=clock.seconds["begin"],
        transfer_s=clock.seconds["transfer"],
        commit_s=clock.seconds["commit"],
        verify_s=clock.seconds["verify"],
        claims=claims,
        derived=derived,
        same_bytes_as=moved.same_bytes_as,
    )
    _warn_of_same_bytes(receipt)
    if receipt.failed:
        reason = "; ".join(f"{claim.name}: {claim.detail}" for claim in receipt.failed)
        beside = _aborted(receiver, reason)
        raise RefitError(f"refit to version {manifest.version}: a claim failed: {reason}{beside}", receipt)
    try:
        receiver.resume()
    except Exception as error:
        beside = _aborted(receiver, f"{type(error).__name__}: {error}")
        what = f"refit to version {manifest.version} could not be resumed from: {error}{beside}"
        raise RefitError(what, receipt) from error
    return receipt


def _as_the_engine_reads(source: WeightSource, receiver: WeightReceiver) -> WeightSource:
    """The source under the engine's names and in its quantisation. Raises RefitError where there is no such thing."""
    try:
        return quantised_for(named_for(source, receiver.naming), receiver.quantisation)
    except NameMapError as error:
        raise RefitError(f"refit refused, names can't be translated to the engine's: {error}") from error
    except QuantisationError as error:
        raise RefitError(f"refit refused, the weights can't be quantised for the engine: {error}") from error


def _aborted(receiver: WeightReceiver, reason: str) -> str:
    """Leave the engine unfit. Returns what went wrong in that, to be said beside the cause and not in its place."""
    try:
        receiver.abort(reason)
    except Exception as error:
        return f"; the engine's abort failed as well: {type(error).__name__}: {error}"
    return ""


def _warn_of_same_bytes(receipt: Receipt) -> None:
    if receipt.same_bytes_as is not None:
        logger.warning(
            "refit: version %d travelled with the very bytes of version %d: either no step was taken, or its change is "
            "below the weights' rounding, or what is sent is not what is trained",
            receipt.version,
            receipt.same_bytes_as,
        )


def _claims(
    manifest: Manifest,
    source: WeightSource,
    receiver: WeightReceiver,
    transported: Claim,
    *,
    verify: bool,
    behaves: Callable[[], Claim] | None,
) -> tuple[Claim, ...]:
    if not verify:
        why = "not due at this refit (refit.verify_every)"
        unchecked = tuple(Claim(name, "not checked", why) for name in ("loaded", "derived", "behaves"))
        return (Claim("covered", "not checked", why), transported, *unchecked)
    gate = Claim("behaves", "not checked", "the gate measures log-probs of this version at the next step")
    return (
        claim_covered(manifest, receiver),
        transported,
        claim_loaded(manifest, source, receiver),
        claim_derived(receiver),
        gate if behaves is None else behaves(),
    )


class _PhaseClock:
    """Seconds by phase: ``with clock("begin"): …``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase, self._start = "", 0.0

    def __call__(self, phase: str) -> _PhaseClock:
        self._phase = phase
        return self

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_exc: object) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a phase is over when the device has done its work
        self.seconds[self._phase] = time.perf_counter() - self._start
