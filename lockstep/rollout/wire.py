"""Frames between an engine's process and its owner: a JSON header and raw arrays over a stream socket. No pickle.

    magic, 4 bytes │ header's length, uint32 │ payload's length, uint64 │ header (JSON) │ payload (arrays in order)

A header names the dtype and shape of every array, so a frame is read without trusting its sender with code. Whoever
waits here has a limit: ``send`` gives up when not one byte moves for a time, ``receive`` calls back at least once a
second so that its caller can look whether the other side still lives.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAGIC = b"LKS1"
_PREFIX = struct.Struct("<4sIQ")
_MAX_PAYLOAD_BYTES = 1 << 40
_TICK_S = 0.5
_KINDS = "biuf"  # of numpy dtypes that may travel: booleans, integers, floats


class WireError(ConnectionError):
    """The stream ended, stood still too long, or holds something that is no frame."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message: ``header`` is plain JSON data, ``arrays`` come with it in order."""

    header: dict[str, Any]
    arrays: list[np.ndarray] = field(default_factory=list)


class Channel:
    """One end of a stream socket. ``send`` may be called by several threads, ``receive`` by one."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._sending = threading.Lock()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)

    def send(self, header: dict[str, Any], arrays: Seq[np.ndarray] = (), *, timeout_s: float) -> None:
        """Send one frame. Raises WireError if the other end is gone or takes no byte for ``timeout_s``."""
        solid = [np.ascontiguousarray(array).reshape(array.shape) for array in arrays]
        described = [{"dtype": array.dtype.str, "shape": array.shape} for array in solid]
        text = json.dumps({**header, "arrays": described}).encode()
        prefix = _PREFIX.pack(MAGIC, len(text), sum(array.nbytes for array in solid))
        with self._sending:
            for view in (memoryview(prefix + text), *(_bytes_of(array) for array in solid if array.nbytes)):
                self._send_piece(view, timeout_s)

    def try_send(self, header: dict[str, Any]) -> bool:
        """Send a small frame if that needs no waiting; False if another thread is sending or there is no room."""
        if not self._sending.acquire(blocking=False):
            return False
        try:
            if not self._writable.poll(0):
                return False
            text = json.dumps({**header, "arrays": []}).encode()
            self._send_piece(memoryview(_PREFIX.pack(MAGIC, len(text), 0) + text), timeout_s=1.0)
            return True
        finally:
            self._sending.release()

    def _send_piece(self, view: memoryview, timeout_s: float) -> None:
        heard = time.monotonic()
        while view:
            try:
                view = view[self._socket.send(view) :]
                heard = time.monotonic()
            except BlockingIOError:
                left_s = heard + timeout_s - time.monotonic()
                if left_s <= 0:
                    raise WireError(f"the other end took no byte for {timeout_s:g} s") from None
                self._writable.poll(left_s * 1000)
            except OSError as error:
                raise WireError(f"the other end is gone: {error}") from error

    def receive(self, tick: Callable[[], None] = lambda: None) -> Frame:
        """The next frame. ``tick`` runs at least every half second while nothing comes; what it raises ends the wait.

        Raises WireError at the end of the stream, within a frame or between two, and for what is no frame.
        """
        magic, header_bytes, payload_bytes = _PREFIX.unpack(self._read(_PREFIX.size, tick))
        if magic != MAGIC or payload_bytes > _MAX_PAYLOAD_BYTES:
            raise WireError(f"not a frame of this protocol: it begins with {magic!r}")
        header = json.loads(self._read(header_bytes, tick))
        arrays = [self._read_array(described, tick) for described in header.pop("arrays")]
        if sum(array.nbytes for array in arrays) != payload_bytes:
            raise WireError(f"a frame of {payload_bytes} payload bytes describes others")
        return Frame(header, arrays)

    def _read_array(self, described: dict[str, Any], tick: Callable[[], None]) -> np.ndarray:
        dtype = np.dtype(described["dtype"])
        if dtype.kind not in _KINDS:
            raise WireError(f"an array of dtype {dtype} may not travel")
        array = np.empty(described["shape"], dtype)
        if array.nbytes:
            self._fill(_bytes_of(array), tick)
        return array

    def _read(self, num_bytes: int, tick: Callable[[], None]) -> bytearray:
        data = bytearray(num_bytes)
        self._fill(memoryview(data), tick)
        return data

    def _fill(self, view: memoryview, tick: Callable[[], None]) -> None:
        while view:
            try:
                num_read = self._socket.recv_into(view)
            except BlockingIOError:
                if not self._readable.poll(_TICK_S * 1000):
                    tick()
                continue
            except OSError as error:
                raise WireError(f"the other end is gone: {error}") from error
            if num_read == 0:
                raise WireError("the other end closed the connection")
            view = view[num_read:]

    def close(self) -> None:
        """Close this end: a ``receive`` that waits in another thread ends with WireError."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # not connected any more
            return
        finally:
            self._socket.close()


def _bytes_of(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data
