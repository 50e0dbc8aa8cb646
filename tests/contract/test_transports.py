"""What every transport must do: each tensor arrives whole, once, bit for bit, in its group; nothing is left over.

Here both ends are in one process, whatever the transport; ``test_engine_process.py`` has them in two.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from lockstep.records import Manifest
from lockstep.refit import cuda_ipc
from lockstep.refit.buckets import TransferError
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
from tests.contract.test_refit import largest_difference, make_pair

ALL = ("local", "shared", "shm", "disk")
IN_BUCKETS = ("shm", "disk")


def some_tensors() -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"embed": (300, 16), "q": (16, 16), "k": (8, 16), "v": (8, 16), "norm": (16,), "head": (300, 16)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return tensors, dict.fromkeys(("q", "k", "v"), "qkv")


@pytest.mark.parametrize("name", ALL)
@given(case=named_tensors())
@settings(deadline=None, max_examples=10)
def test_random_tensors_arrive_bit_for_bit_and_not_without_the_refit(name, case):
    tensors, groups = case
    receiver = RecordingReceiver(zeros_like(tensors))
    untouched = same_bits(receiver.live(), zeros_like(tensors))
    assert untouched
    with tempfile.TemporaryDirectory() as folder:
        source = TensorSource(tensors, 3, groups)
        receipt = run_refit(source, receiver, any_transport(name, Path(folder)), verify=True)
        assert not list(Path(folder).iterdir())
    assert same_bits(receiver.live(), tensors)
    assert receiver.host.version == receipt.version == 3
    assert receipt.transport == name
    moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert receipt.transferred_bytes == (0 if name == "shared" else moved)
    filed = receipt.as_dict()
    assert filed["replicas"] == 1
    if name == "shared":
        assert "transfer_bytes_per_s" not in filed
    else:
        assert filed["transfer_bytes_per_s"] == pytest.approx(moved / receipt.transfer_s)
    transported = next(claim for claim in receipt.claims if claim.name == "transported")
    assert transported.status == ("held" if name in IN_BUCKETS else "not checked")
    for group in set(groups.values()) if name in IN_BUCKETS else ():
        members = {one for one, of in groups.items() if of == group}
        assert sum(bool(members & set(call)) for call in receiver.calls) == 1, "a group was split over load calls"


@pytest.mark.parametrize("name", IN_BUCKETS)
@pytest.mark.parametrize("bucket_bytes", [1, 700, 1500, 1 << 20])
def test_any_bucket_size_gives_the_same_weights(name, bucket_bytes, tmp_path):
    """(C1, C2: pairs split by a bucket's border; an embedding larger than a bucket)"""
    tensors, groups = some_tensors()
    receiver = RecordingReceiver(zeros_like(tensors))
    transport = any_transport(name, tmp_path, bucket_bytes=bucket_bytes)
    receipt = run_refit(TensorSource(tensors, 1, groups), receiver, transport, verify=True)
    assert same_bits(receiver.live(), tensors)
    assert ["q", "k", "v"] in receiver.calls or bucket_bytes > 4000
    assert receipt.num_buckets == len(receiver.calls) == {1: 4, 700: 4, 1500: 4, 1 << 20: 1}[bucket_bytes]


@pytest.mark.parametrize("name", IN_BUCKETS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_trainer_and_engine_agree_after_a_refit_in_buckets_and_not_before(name, architecture, tmp_path):
    trainer, engine = make_pair(architecture)
    for path in ("prefill", "decode"):
        assert largest_difference(trainer, engine, path) > 1e-2, "without a refit this test must fail"
    receipt = run_refit(trainer.weights(), engine.receiver(), any_transport(name, tmp_path), verify=True)
    for path in ("prefill", "decode"):
        assert largest_difference(trainer, engine, path) < 1e-5
    claims = {claim.name: claim.status for claim in receipt.claims}
    assert {claims[claim] for claim in ("covered", "transported", "loaded")} == {"held"}
    assert receipt.num_buckets > 2


class _SlowEnd:
    """The receiver's end in a thread that takes its time, so that a sender that does not wait overtakes it."""

    def __init__(self, receiver: RecordingReceiver) -> None:
        self.receiver = receiver
        self.thread = ThreadPoolExecutor(1)
        self.peer: InProcessPeer | None = None
        self.unanswered = self.most_unanswered = 0
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.receiver, name)

    def begin(self, manifest: Manifest) -> None:
        self.peer = InProcessPeer(self.receiver, manifest)
        self.receiver.begin(manifest)

    def hand_over(self, message: dict[str, Any]) -> Future[dict[str, Any]]:
        with self.lock:
            self.unanswered += 1
            self.most_unanswered = max(self.most_unanswered, self.unanswered)
        return self.thread.submit(self._handle, message)

    def _handle(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.peer is not None
        time.sleep(0.01)
        try:
            return self.peer.hand_over(message).result()
        finally:
            with self.lock:
                self.unanswered -= 1


@pytest.mark.parametrize("name", IN_BUCKETS)
def test_a_buffer_is_filled_again_only_after_its_answer(name, tmp_path):
    """(C28: many buckets and a slow consumer)"""
    tensors = {f"t{i}": torch.full((1024,), float(i)) for i in range(12)}
    receiver = RecordingReceiver(zeros_like(tensors))
    end: Any = _SlowEnd(receiver)
    run_refit(TensorSource(tensors, 1), end, any_transport(name, tmp_path), verify=True)
    end.thread.shutdown()
    assert same_bits(receiver.live(), tensors)
    assert end.most_unanswered == 2, "two buckets in flight: one is filled while the other is loaded"


@pytest.mark.parametrize("name", ALL)
def test_what_the_source_does_after_a_refit_reaches_an_engine_that_shares_and_no_other(name, tmp_path):
    """(C15: weights were unmerged in the storage that was still to be loaded)"""
    tensors, groups = some_tensors()
    sent = {one: tensor.clone() for one, tensor in tensors.items()}
    receiver = RecordingReceiver(zeros_like(tensors))
    run_refit(TensorSource(tensors, 1, groups), receiver, any_transport(name, tmp_path), verify=True)
    for tensor in tensors.values():
        tensor.neg_()
    assert same_bits(receiver.live(), tensors if name == "shared" else sent)


class _Hoarder(RecordingReceiver):
    """A receiver that keeps what it was given."""

    def receive(self, tensors: Any) -> None:
        self.kept = list(tensors)
        super().receive(self.kept)


@pytest.mark.parametrize("name", IN_BUCKETS)
def test_a_receiver_that_keeps_views_of_a_bucket_is_refused(name, tmp_path):
    tensors, groups = some_tensors()
    receiver = _Hoarder(zeros_like(tensors))
    with pytest.raises(RefitError, match="kept views of bucket 0"):
        run_refit(TensorSource(tensors, 1, groups), receiver, any_transport(name, tmp_path), verify=True)
    assert receiver.host.unfit is not None
    assert receiver.host.version == 0


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_left_after_a_transfer_or_a_failure(name, tmp_path):
    before = shared_memory()
    tensors, groups = some_tensors()
    receiver = RecordingReceiver(zeros_like(tensors))
    transport = any_transport(name, tmp_path)
    for version in (1, 2, 3):
        run_refit(TensorSource(tensors, version, groups), receiver, transport, verify=True)
    broken = TensorSource(tensors, 4, groups)
    broken.shards = lambda: iter(list(TensorSource(tensors, 4).shards())[:4])  # not the norm
    with pytest.raises(RefitError, match="norm"):
        run_refit(broken, receiver, transport, verify=True)
    assert_nothing_left(before)
    assert not list(tmp_path.iterdir())


KILLED = """
import os, sys
from pathlib import Path
from lockstep.refit.folder_lock import held
folder = Path(sys.argv[1])
with held(folder, "lockstep-refit-host-12-00"):
    (folder / "lockstep-refit-host-12-00.partial").mkdir()
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_disk_transport_removes_what_a_killed_sender_left_and_nothing_of_the_living(tmp_path):
    """Which process is meant, the lock says: a container's process 12 is not another's."""
    others = tmp_path / "version-7"
    others.mkdir()
    tensors, groups = some_tensors()

    def transfer() -> None:
        receiver = RecordingReceiver(zeros_like(tensors))
        run_refit(TensorSource(tensors, 1, groups), receiver, any_transport("disk", tmp_path), verify=True)

    sender = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert sender.stdout is not None
        assert sender.stdout.readline() == "held\n"
        living = set(tmp_path.iterdir())
        assert len(living) == 3
        transfer()
        assert set(tmp_path.iterdir()) == living, "it is at work"
    finally:
        sender.kill()
        sender.communicate()
    assert set(tmp_path.iterdir()) == living
    transfer()
    assert set(tmp_path.iterdir()) == {others}


def test_disk_without_a_folder_is_refused():
    from lockstep.refit.transports import make_transport

    with pytest.raises(ValueError, match=r"refit\.folder"):
        make_transport("disk")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal is of machines without a GPU")
def test_cuda_ipc_without_a_gpu_is_refused_by_name_and_leaves_the_engine_unfit(tmp_path):
    tensors, groups = some_tensors()
    receiver = RecordingReceiver(zeros_like(tensors))
    with pytest.raises(RefitError, match="cuda_ipc needs a GPU"):
        run_refit(TensorSource(tensors, 1, groups), receiver, any_transport("cuda_ipc", tmp_path), verify=True)


def test_a_handle_of_gpu_memory_survives_json():
    import json

    handle = (0, b"\x00\xff\x17", 4096, 256, b"ref", 3, b"", True, None)
    assert cuda_ipc.unpack_handle(json.loads(json.dumps(cuda_ipc.pack_handle(handle)))) == handle


def test_gpu_memory_of_expandable_segments_is_refused(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(TransferError, match="expandable segments"):
        cuda_ipc.CudaBuffer.create(4096)


@pytest.mark.parametrize("name", IN_BUCKETS)
def test_a_later_version_with_the_very_same_bytes_raises_an_alarm(name, tmp_path, caplog):
    """verl#7495: an adapter was trained, the base weights were pushed, and every push succeeded."""
    tensors, groups = some_tensors()
    receiver, transport = RecordingReceiver(zeros_like(tensors)), any_transport(name, tmp_path)

    def send(version: int) -> int | None:
        caplog.clear()
        return run_refit(TensorSource(tensors, version, groups), receiver, transport, verify=False).same_bytes_as

    assert send(1) is None
    assert send(1) is None, "the same version again is no surprise"
    assert send(2) == 1
    assert "version 2 travelled with the very bytes of version 1" in caplog.text
    first = next(iter(tensors))
    tensors[first] = tensors[first].clone()
    tensors[first].view(torch.uint8).view(-1)[0] ^= 1
    assert send(3) is None, "one bit is a change"
    assert not caplog.text
