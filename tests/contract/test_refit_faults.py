"""Whatever breaks a refit, in either direction and at any bucket: it is named, the engine serves nothing, its version
stays, no shared memory is left, and the next full refit mends it.

Here the receiver's end is in this process behind a way that mistreats messages and memory; real processes that are
killed and stopped are in ``test_engine_process.py``.
"""

from __future__ import annotations

import itertools
import os
import resource
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lockstep.records import Manifest
from lockstep.refit import shm
from lockstep.refit.conversation import InProcessPeer
from lockstep.refit.transaction import RefitError, run_refit
from tests.contract.refit_ends import (
    RecordingReceiver,
    TensorSource,
    any_transport,
    assert_nothing_left,
    named_tensors,
    same_bits,
    shared_memory,
    zeros_like,
)

WIRE_FAULTS = {
    "lost": "no answer to bucket|is out of order",
    "doubled": "is doubled",
    "reordered": "is out of order|no answer",
    "truncated": "cut|can't be read",
    "corrupt": "is corrupt",
    "stale": "trailer says|is corrupt|can't be read|lacks",
    "receiver dies": "the engine's process is gone",
    "lying digest": "the receiver's digest is",
    "unfinished": "no answer to the end",
}
"""What can happen to a bucket, and what the error must say (either, where it depends on what comes after it)."""

SOURCE_FAULTS = {
    "sender dies": "the trainer broke",
    "missing": "missing: the source ended before|the source brought",
    "extra": "the source brought ghost",
    "ill-shaped": "came as",
    "ill-typed": "came as",
    "out of order": "the source brought",
}


SOURCE_CASES = [
    (name, fault)
    for name in ("local", "shared", "shm", "disk")
    for fault in SOURCE_FAULTS
    if fault != "out of order" or name in ("shm", "disk")  # by themselves, tensors may come in any order
]


class FaultyEnd:
    """The receiver's end, reached by a way that mistreats bucket ``at`` as ``fault`` says."""

    def __init__(self, receiver: RecordingReceiver, fault: str, at: int) -> None:
        self.receiver, self.fault, self.at = receiver, fault, at
        self.peer: InProcessPeer | None = None
        self.opened: dict[str, Any] = {}
        self.held: tuple[dict[str, Any], Future[dict[str, Any]]] | None = None
        self.happened = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.receiver, name)

    def begin(self, manifest: Manifest) -> None:
        self.peer = InProcessPeer(self.receiver, manifest)
        self.receiver.begin(manifest)

    def hand_over(self, message: dict[str, Any]) -> Future[dict[str, Any]]:
        assert self.peer is not None
        if message["kind"] == "open":
            self.opened = message
        if self.fault == "unfinished" and message["kind"] == "close":
            self.happened = True
            return Future()
        if self.held is not None:
            (late, answer), self.held = self.held, None
            overtaker = self.peer.hand_over(message)
            _pass_on(self.peer.hand_over(late), answer)
            return overtaker
        if message["kind"] != "bucket" or message["number"] != self.at:
            return self.peer.hand_over(message)
        self.happened = True
        return self._mistreat(message)

    def _mistreat(self, message: dict[str, Any]) -> Future[dict[str, Any]]:
        assert self.peer is not None
        unanswered: Future[dict[str, Any]] = Future()
        if self.fault == "lost":
            return unanswered
        if self.fault == "reordered":
            self.held = (message, unanswered)
            return unanswered
        if self.fault == "receiver dies":
            unanswered.set_exception(ConnectionError("the engine's process is gone"))
            return unanswered
        if self.fault == "doubled":
            self.peer.hand_over(message).result()
        elif self.fault in ("truncated", "corrupt", "stale"):
            self._spoil(message)
        answer = self.peer.hand_over(message)
        if self.fault == "lying digest":
            unanswered.set_result({**answer.result(), "digest": "0" * 32})
            return unanswered
        return answer

    def _spoil(self, message: dict[str, Any]) -> None:
        """Change the memory or the file that the message announces."""
        if self.opened["transport"] == "disk":
            path = Path(self.opened["path"]) / f"bucket-{self.at:05d}.safetensors"
            data = bytearray(path.read_bytes())
            if self.fault == "truncated":
                del data[-1:]
            elif self.fault == "corrupt":
                data[-1] ^= 1
            else:
                data = bytearray((path.parent / "bucket-00000.safetensors").read_bytes())
            path.write_bytes(data)
            return
        buffer = shm.attach(self.opened["buffers"][message["buffer"]])
        words = self.peer._arrivals._transfer.plan[self.at].num_bytes  # pyright: ignore
        if self.fault == "truncated":
            buffer[words:] = 0
        elif self.fault == "corrupt":
            buffer[words - 1] ^= 1
        else:
            buffer[:words] = 0
            buffer[words + 24] ^= 1  # the number in the trailer: an earlier bucket's bytes


def _pass_on(asked: Future[dict[str, Any]], answer: Future[dict[str, Any]]) -> None:
    error = asked.exception()
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(asked.result())


def refused(source: Any, end: Any, transport: Any) -> str:
    with pytest.raises(RefitError) as caught:
        run_refit(source, end, transport, verify=True)
    return str(caught.value)


def assert_out_of_service_until_a_full_refit(
    receiver: RecordingReceiver, tensors: dict[str, torch.Tensor], groups: dict[str, str], transport: Any
) -> None:
    assert receiver.host.unfit is not None, "the engine must be out of service"
    assert receiver.host.version == 0, "the version must not advance"
    assert not receiver.host.refitting
    run_refit(TensorSource(tensors, 9, groups), receiver, transport, verify=True)
    assert receiver.host.unfit is None
    assert receiver.host.version == 9
    assert same_bits(receiver.live(), tensors)


def matches(pattern: str, text: str) -> bool:
    return any(part in text for part in pattern.split("|"))


@pytest.mark.parametrize("name", ["shm", "disk"])
@pytest.mark.parametrize("fault", WIRE_FAULTS)
@given(case=named_tensors(), data=st.data())
@settings(deadline=None, max_examples=4)
def test_a_fault_on_the_way_is_named_and_never_served(name, fault, case, data):
    """(C21: an update that fails half-way leaves no mixture in service)"""
    tensors, groups = case
    before = shared_memory()
    with tempfile.TemporaryDirectory() as folder:
        transport = any_transport(name, Path(folder), bucket_bytes=1, timeout_s=0.2)
        num_buckets = len(set(groups.values()))
        # What overtakes or replaces another needs another.
        first = 1 if fault == "stale" else 0
        last = num_buckets - 2 if fault == "reordered" else num_buckets - 1
        assume(last >= first)
        receiver = RecordingReceiver(zeros_like(tensors))
        end = FaultyEnd(receiver, fault, data.draw(st.integers(first, last)))
        text = refused(TensorSource(tensors, 1, groups), end, transport)
        assert end.happened
        assert matches(WIRE_FAULTS[fault], text), text
        assert_out_of_service_until_a_full_refit(receiver, tensors, groups, transport)
        assert not list(Path(folder).iterdir())
    del end
    assert_nothing_left(before)


def broken_shards(source: TensorSource, fault: str, at: int) -> Iterator[Any]:
    shards = list(source.shards())
    if fault == "out of order":
        other = (at + 1) % len(shards)
        shards[at], shards[other] = shards[other], shards[at]
    for index, (name, shape, offset, tensor) in enumerate(shards):
        if index != at or fault == "out of order":
            yield name, shape, offset, tensor
        elif fault == "sender dies":
            raise OSError("the trainer broke")
        elif fault == "extra":
            yield "ghost", shape, offset, tensor
        elif fault == "ill-shaped":
            longer = tensor.new_zeros((*shape, 2))
            yield name, tuple(longer.shape), (0,) * longer.ndim, longer
        elif fault == "ill-typed":
            yield name, shape, offset, tensor.new_zeros(shape, dtype=torch.float16)


@pytest.mark.parametrize(("name", "fault"), SOURCE_CASES)
@given(case=named_tensors(), data=st.data())
@settings(deadline=None, max_examples=3)
def test_a_source_that_breaks_its_word_is_named_and_never_served(name, fault, case, data):
    """(C11: types, shapes and names are those announced, or nothing is served)"""
    tensors, groups = case
    before = shared_memory()
    with tempfile.TemporaryDirectory() as folder:
        transport = any_transport(name, Path(folder), bucket_bytes=1500)
        at = data.draw(st.integers(0, len(tensors) - 1))
        assume(fault != "out of order" or len(tensors) > 1)
        receiver = RecordingReceiver(zeros_like(tensors))
        source = TensorSource(tensors, 1, groups)
        source.shards = lambda: broken_shards(TensorSource(tensors, 1), fault, at)
        text = refused(source, receiver, transport)
        if name in ("shm", "disk"):
            assert matches(SOURCE_FAULTS[fault], text), text
        else:  # the receiver's own words, which name the tensor or the cause
            assert matches(f"t{at}|ghost|the trainer broke", text), text
        if name != "shared":
            assert_out_of_service_until_a_full_refit(receiver, tensors, groups, transport)
        assert not list(Path(folder).iterdir())
    assert_nothing_left(before)


@pytest.mark.parametrize("name", ["shm", "disk"])
@pytest.mark.parametrize("fault", ["missing", "extra", "doubled", "shape", "dtype"])
@given(case=named_tensors(), data=st.data())
@settings(deadline=None, max_examples=3)
def test_a_wrong_manifest_is_refused_by_name_before_a_byte_moves(name, fault, case, data):
    tensors, groups = case
    receiver = RecordingReceiver(zeros_like(tensors))
    source = TensorSource(tensors, 1, groups)
    good = source.manifest()
    at = data.draw(st.integers(0, len(tensors) - 1))
    spec, rest = good.tensors[at], (*good.tensors[:at], *good.tensors[at + 1 :])
    changed = {
        "missing": rest,
        "extra": (*good.tensors, replace(spec, name="ghost", group="ghost")),
        "doubled": (*good.tensors, spec),
        "shape": (*rest, replace(spec, shape=(*spec.shape, 2))),
        "dtype": (*rest, replace(spec, dtype="float64")),
    }[fault]
    source.manifest = lambda: replace(good, tensors=changed)
    with tempfile.TemporaryDirectory() as folder:
        text = refused(source, receiver, any_transport(name, Path(folder)))
    assert f"{fault}: {'ghost' if fault == 'extra' else spec.name}" in text
    assert receiver.calls == []
    assert receiver.host.unfit is None, "refused before anything moved: the engine goes on as it was"
    assert same_bits(receiver.live(), zeros_like(tensors))


def pair() -> tuple[dict[str, torch.Tensor], RecordingReceiver]:
    tensors = {f"t{i}": torch.full((600,), float(i + 1)) for i in range(5)}
    return tensors, RecordingReceiver(zeros_like(tensors))


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """No file of this process, in memory or on a disk, may grow larger: what a full file system does to a writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("name", "says"), [("shm", "bytes of shared memory for a bucket"), ("disk", "can't be written")]
)
def test_a_full_file_system_is_named_before_the_first_bucket_is_loaded(name, says, tmp_path):
    tensors, receiver = pair()
    before = shared_memory()
    transport = any_transport(name, tmp_path)
    with files_of_at_most(2000):
        text = refused(TensorSource(tensors, 1), receiver, transport)
    assert says in text
    assert os.strerror(27) in text  # EFBIG: what RLIMIT_FSIZE answers
    assert receiver.calls == []
    assert_out_of_service_until_a_full_refit(receiver, tensors, {}, transport)
    assert_nothing_left(before)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [28, 12])
def test_shared_memory_that_is_full_is_an_error_and_no_signal(number, monkeypatch):
    tensors, receiver = pair()

    def full(_descriptor: int, _offset: int, _length: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = shared_memory()
    text = refused(TensorSource(tensors, 1), receiver, any_transport("shm", Path("/")))
    assert os.strerror(number) in text
    assert "use a smaller refit.bucket_bytes" in text
    assert_nothing_left(before)


@pytest.mark.parametrize("name", ["local", "shm", "disk"])
def test_a_second_refit_while_one_runs_is_refused_and_the_first_goes_on(name, tmp_path):
    tensors, receiver = pair()
    second: list[str] = []
    inner = TensorSource(tensors, 1)

    def shards() -> Iterator[Any]:
        for index, shard in enumerate(TensorSource(tensors, 1).shards()):
            if index == 3:
                second.append(refused(TensorSource(tensors, 2), receiver, any_transport(name, tmp_path / "second")))
            yield shard

    inner.shards = shards  # pyright: ignore[reportAttributeAccessIssue]
    receipt = run_refit(inner, receiver, any_transport(name, tmp_path / "first"), verify=False)
    assert "a refit to version 1 has begun and is not over" in second[0]
    assert receipt.version == receiver.host.version == 1
    assert receiver.host.unfit is None
    assert same_bits(receiver.live(), tensors)


class Delta(TensorSource):
    """A declared subset over a base."""

    def __init__(self, tensors: dict[str, torch.Tensor], version: int, base_version: int) -> None:
        super().__init__(tensors, version)
        self.base_version = base_version

    def manifest(self) -> Manifest:
        return replace(super().manifest(), base_version=self.base_version)


@pytest.mark.parametrize("name", ["local", "shm", "disk"])
def test_a_delta_is_laid_over_its_own_base_only(name, tmp_path):
    """(C27: a part is held to its own rule, the whole to its own)"""
    tensors, receiver = pair()
    transport = any_transport(name, tmp_path)
    run_refit(TensorSource(tensors, 4), receiver, transport, verify=True)
    changed = {"t2": torch.full((600,), -7.0)}
    text = refused(Delta(changed, 5, base_version=3), receiver, transport)
    assert "a subset over version 3, the engine holds version 4" in text
    assert receiver.host.unfit is None
    assert same_bits(receiver.live(), tensors)
    run_refit(Delta(changed, 5, base_version=4), receiver, transport, verify=True)
    assert receiver.host.version == 5
    assert same_bits(receiver.live(), tensors | changed)


def test_a_delta_over_weights_that_broke_off_is_refused(tmp_path):
    tensors, receiver = pair()
    transport = any_transport("shm", tmp_path)
    run_refit(TensorSource(tensors, 4), receiver, transport, verify=True)
    torn = TensorSource(tensors, 5)
    torn.shards = lambda: itertools.islice(TensorSource(tensors, 5).shards(), 3)  # pyright: ignore
    refused(torn, receiver, transport)
    text = refused(Delta({"t2": tensors["t2"]}, 5, base_version=4), receiver, transport)
    assert "a refit broke off here: the engine needs a full one" in text
    assert receiver.host.unfit is not None
