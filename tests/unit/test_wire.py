"""Frames arrive as they were sent; what is no frame, and who does not answer, is named."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from lockstep.records import Completion, GenerateRequest, Manifest, SamplingParams, TensorSpec
from lockstep.rollout import messages
from lockstep.rollout.wire import Channel, Frame, WireError

ARRAYS = st.lists(
    arrays_of.arrays(
        st.sampled_from([np.dtype(kind) for kind in ("uint8", "int32", "float32", "bool", "uint16")]),
        arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    ),
    max_size=4,
)


def pair() -> tuple[Channel, Channel, socket.socket]:
    one, other = socket.socketpair()
    return Channel(one), Channel(other), other


def exchanged(header: dict, arrays: list[np.ndarray]) -> Frame:
    sender, receiver, _ = pair()
    frames: list[Frame] = []
    thread = threading.Thread(target=lambda: frames.append(receiver.receive()))
    thread.start()
    sender.send(header, arrays, timeout_s=20)
    thread.join(20)
    return frames[0]


@given(ARRAYS)
@settings(deadline=None, max_examples=50)
def test_a_frame_arrives_as_it_was_sent(arrays):
    frame = exchanged({"op": "x", "text": "ä│"}, arrays)
    assert frame.header == {"op": "x", "text": "ä│"}
    assert len(frame.arrays) == len(arrays)
    for found, sent in zip(frame.arrays, arrays, strict=True):
        assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
        assert found.tobytes() == sent.tobytes()


def test_a_frame_larger_than_the_socket_holds_arrives():
    big = np.arange(1 << 20, dtype=np.float32).reshape(1024, -1)
    np.testing.assert_array_equal(exchanged({}, [big, big.T]).arrays[1], big.T)


def test_an_array_of_objects_is_refused():
    text = b'{"arrays": [{"dtype": "|O", "shape": [1]}]}'
    other, ours = socket.socketpair()
    other.send(b"LKS1" + len(text).to_bytes(4, "little") + (8).to_bytes(8, "little") + text)
    with pytest.raises(WireError, match="dtype object may not travel"):
        Channel(ours).receive()


def test_another_protocol_is_named():
    sender, _, other = pair()
    other.send(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(WireError, match="not a frame of this protocol: it begins with b'GET '"):
        sender.receive()


def test_a_peer_that_takes_nothing_is_given_up_after_the_time():
    sender, _receiver, _ = pair()
    begun = time.monotonic()
    with pytest.raises(WireError, match=r"took no byte for 0\.3 s"):
        sender.send({}, [np.zeros(10_000_000, np.uint8)], timeout_s=0.3)
    assert 0.2 < time.monotonic() - begun < 10


def test_the_end_of_a_peer_is_named_between_frames_and_within_one():
    sender, receiver, _ = pair()
    receiver.close()
    with pytest.raises(WireError, match="closed the connection"):
        sender.receive()
    with pytest.raises(WireError, match="the other end is gone"):
        sender.send({}, timeout_s=1)
    sender, _, other = pair()
    other.send(b"LKS1\x05")
    other.close()
    with pytest.raises(WireError):
        sender.receive()


def test_who_waits_is_called_back_and_may_end_the_wait():
    sender, _receiver, _ = pair()

    def tick() -> None:
        raise TimeoutError("enough")

    with pytest.raises(TimeoutError, match="enough"):
        sender.receive(tick)


def test_a_small_frame_is_not_sent_where_it_would_have_to_wait():
    sender, receiver, _ = pair()
    assert sender.try_send({"op": "ping"})
    assert receiver.receive().header == {"op": "ping"}
    with pytest.raises(WireError):
        sender.send({}, [np.zeros(10_000_000, np.uint8)], timeout_s=0.1)
    assert not sender.try_send({"op": "ping"}), "the socket is full"


def test_records_come_back_as_they_were():
    request = GenerateRequest(
        "r", np.array([1, 2], np.int32), SamplingParams(4, stop_token_ids=(3, 5), stop_strings=("a", "ß"), seed=2**62)
    )
    arrays: list[np.ndarray] = []
    found = messages.read_request(messages.plain(request, arrays), arrays)
    assert found.sampling == request.sampling
    np.testing.assert_array_equal(found.prompt_tokens, request.prompt_tokens)
    completion = Completion(
        "r", *(np.arange(n, dtype=np.int32) for n in (3, 3, 3, 3)), "stop", routes=np.zeros((4, 2, 2), np.uint8)
    )  # fmt: skip
    arrays = []
    back = messages.read_completion(messages.plain(completion, arrays), arrays)
    assert (back.request_id, back.finish_reason, back.error) == ("r", "stop", None)
    assert back.routes is not None
    assert back.routes.shape == (4, 2, 2)
    specs = (TensorSpec("w", (2, 3), "bfloat16", "g", trainable=False, scale="s"), TensorSpec("s", (), "float32", "g"))
    manifest = Manifest(7, specs, {"head": "w"}, "llama", "checkpoint", base_version=6, quantisation="fp8")
    assert messages.read_manifest(messages.plain(manifest, [])) == manifest


def test_nothing_but_records_and_plain_data_travels():
    with pytest.raises(TypeError, match="a function can't travel"):
        messages.plain({"f": messages.plain}, [])
