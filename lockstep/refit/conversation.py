"""What a sender says to the receiver's end of a transport, and how long it waits for each answer.

    wait ─▶ open ─▶ bucket 0 ─▶ bucket 1 ─▶ ◀─ digest of 0 bucket 2 ─▶ ◀─ digest of 1 … close ─▶ ◀─ digest of all

At most ``IN_FLIGHT`` buckets are unanswered: a buffer is filled again only after the receiver has answered for what was
in it. Every answer brings the digest that the receiver computed itself.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol, runtime_checkable

from lockstep.interfaces import WeightReceiver
from lockstep.records import Claim, Manifest
from lockstep.refit.arrivals import Arrivals
from lockstep.refit.buckets import TransferError, fold

IN_FLIGHT = 2
"""Buffers: one is filled while the other is loaded."""


@runtime_checkable
class Peer(Protocol):
    """The way to the receiver's end: a message out, an answer later."""

    def hand_over(self, message: dict[str, Any]) -> Future[dict[str, Any]]:
        """Send without waiting."""
        ...


class InProcessPeer:
    """The receiver's end in this very process: answers are there at once."""

    def __init__(self, receiver: WeightReceiver, manifest: Manifest) -> None:
        self._receiver, self._manifest, self._arrivals = receiver, manifest, Arrivals()

    def hand_over(self, message: dict[str, Any]) -> Future[dict[str, Any]]:
        """Handle the message now."""
        answer: Future[dict[str, Any]] = Future()
        try:
            answer.set_result(self._arrivals.handle(message, self._receiver, self._manifest))
        except Exception as error:
            answer.set_exception(error)
        return answer


def peer_of(receiver: WeightReceiver, manifest: Manifest) -> Peer:
    """The receiver itself if it lives elsewhere and has a way there, else its end in this process."""
    return receiver if isinstance(receiver, Peer) else InProcessPeer(receiver, manifest)


class Conversation:
    """One transfer's messages, in order. Raises TransferError when an answer is late or of another digest; the
    receiver's own errors as they come."""

    def __init__(self, peer: Peer, timeout_s: float) -> None:
        self._peer, self._timeout_s = peer, timeout_s
        self._digests: list[str] = []
        self._waiting: deque[tuple[int, Future[dict[str, Any]]]] = deque()
        self._opening: Future[dict[str, Any]] | None = None

    def open(self, message: dict[str, Any]) -> None:
        """Announce the transfer. What the receiver says to it is heard before the first bucket is announced."""
        self._opening = self._peer.hand_over({**message, "kind": "open"})

    def still_here(self) -> None:
        """Before the transfer is open: tell the receiver that it is being prepared, so that it goes on waiting."""
        self._answer(self._peer.hand_over({"kind": "wait"}), "the word that the transfer is being prepared")

    def make_room(self) -> None:
        """Wait until less than ``IN_FLIGHT`` buckets are unanswered: call it before a buffer is filled again."""
        while len(self._waiting) >= IN_FLIGHT:
            self._collect()

    def send(self, number: int, digest: str, message: dict[str, Any]) -> None:
        """Announce a bucket that is ready."""
        self._opened()
        self.make_room()
        self._digests.append(digest)
        self._waiting.append((number, self._peer.hand_over({**message, "kind": "bucket", "number": number})))

    def close(self) -> Claim:
        """Wait for all answers and end the transfer: the ``transported`` claim."""
        self._opened()
        while self._waiting:
            self._collect()
        answer = self._answer(self._peer.hand_over({"kind": "close"}), "the end of the transfer")
        ours, theirs, count = fold(self._digests), answer.get("digest"), answer.get("num_buckets")
        if (theirs, count) != (ours, len(self._digests)):
            detail = f"{len(self._digests)} buckets of digest {ours} were sent; {count} of digest {theirs} came"
            return Claim("transported", "failed", detail)
        return Claim("transported", "held", f"{count} buckets, digests of both ends are {ours}")

    def _opened(self) -> None:
        if self._opening is not None:
            opening, self._opening = self._opening, None
            self._answer(opening, "the opening of the transfer")

    def _collect(self) -> None:
        number, asked = self._waiting.popleft()
        digest = self._answer(asked, f"bucket {number}").get("digest")
        if digest != self._digests[number]:
            sent = self._digests[number]
            raise TransferError(f"bucket {number}: the receiver's digest is {digest}, the sender's {sent}")

    def _answer(self, asked: Future[dict[str, Any]], what: str) -> dict[str, Any]:
        try:
            return asked.result(self._timeout_s)
        except FutureTimeoutError:
            if asked.done():
                raise  # the receiver's own
            raise TransferError(
                f"no answer to {what} within {self._timeout_s:g} s: the engine hangs or a message was lost"
            ) from None
