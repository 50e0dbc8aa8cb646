"""The owner's end of an engine's process: starts it, asks it, notices its end or its silence, ends it.

A thread reads what the process answers, so that an answer needs no event loop. While anything is asked, the process is
pinged; if nothing at all comes back for ``timeout_s``, it counts as hung and is killed, by its own process id. Then,
as after any other end of it, everything that was asked fails with the reason and the last words of its stderr.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.environment.processes import child_environment, shell_environment
from lockstep.environment.secrets import mask_text, secret_values
from lockstep.rollout.engine_process import RefitGivenUp
from lockstep.rollout.receiver import RefitRefused
from lockstep.rollout.torch_engine import EngineError, EngineUnfit
from lockstep.rollout.vllm_start import EngineUnavailable
from lockstep.rollout.wire import Channel, Frame, WireError

_LAST_WORDS_BYTES = 4000
START_LIMIT_S = 600.0
"""Least time that a process may take to start: importing, loading and compiling an engine takes minutes at worst."""

_CLOSE_S = 5.0
"""How long a process that was told to close may take before it is killed."""

_EXIT_S = 1.0
"""How long a process whose socket has ended may take to be gone before it is killed."""


class EngineProcessError(RuntimeError):
    """The engine's process ended, hangs, or failed in a way that it has no name for; the text says which."""


_KNOWN_ERRORS: Mapping[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(EngineUnavailable, EngineUnfit, EngineError, RefitRefused, RefitGivenUp),
        *(ValueError, TypeError, RuntimeError, OSError),
    )
} | {"MemoryError": MemoryError}


class _Silent(WireError):
    """The process is there and says nothing."""


@dataclass(slots=True)
class _Asked:
    """One question that waits for its answer."""

    operation: str
    since: float = field(default_factory=time.monotonic)
    answer: Future[Frame] = field(default_factory=Future)


class EngineProcess:
    """A child process that serves an engine. ``command`` starts it; the descriptor of its socket and this process' id
    are appended. ``environment`` are its variables; None: what crosses from here (``environment.processes``).

    Raises EngineProcessError if it does not come up, or the error of the engine's own construction."""

    def __init__(
        self,
        command: Seq[str],
        settings: dict[str, Any],
        *,
        timeout_s: float,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._patience_s = max(timeout_s, START_LIMIT_S)
        self.version = -1
        self._ids = itertools.count()
        self._asked: dict[int, _Asked] = {}
        self._lock = threading.Lock()
        self._heard = self._pinged = time.monotonic()
        self._dead: str | None = None
        self._closing = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process
        variables = child_environment(shell_environment(), {}) if environment is None else environment
        self._secrets = secret_values(variables)
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,  # libraries that print; the protocol has its own socket
                stderr=self._log,
                env=importable(variables),
            )
        except OSError as error:
            self._channel.close()
            self._log.close()
            raise EngineProcessError(f"the engine's process could not be started: {error}") from error
        finally:
            theirs.close()
        self._finalizer = weakref.finalize(self, _kill, self._process)
        self._reader = threading.Thread(target=_read, args=(weakref.ref(self), self._channel), daemon=True)
        self._reader.start()
        try:
            self.started = self.ask("start", {"settings": settings, "timeout_s": timeout_s}).header["value"]
        except BaseException:
            self.close()
            raise
        self._patience_s = timeout_s

    @property
    def process_id(self) -> int:
        """Of the child."""
        return self._process.pid

    def post(self, operation: str, header: dict[str, Any], arrays: Seq[np.ndarray] = ()) -> Future[Frame]:
        """Ask without waiting. The future holds the answer, or the error that it was, typed as in the engine."""
        return self.post_together(operation, 1, header, arrays)[0]

    def post_together(
        self, operation: str, count: int, header: dict[str, Any], arrays: Seq[np.ndarray] = ()
    ) -> list[Future[Frame]]:
        """Ask ``count`` questions in one frame, so that they are known there at once; an answer for each."""
        asked = [_Asked(operation) for _ in range(count)]
        for one in asked:
            one.answer.set_running_or_notify_cancel()
        with self._lock:
            if self._dead is not None:
                raise EngineProcessError(self._dead)
            numbers = [next(self._ids) for _ in asked]
            self._asked.update(zip(numbers, asked, strict=True))
        try:
            frame = {**header, "op": operation, "id": numbers[0], "ids": numbers}
            self._channel.send(frame, arrays, timeout_s=self.timeout_s)
        except WireError as error:
            self._lost(error)
            raise EngineProcessError(self._dead or str(error)) from error
        return [one.answer for one in asked]

    def ask(self, operation: str, header: dict[str, Any] | None = None, arrays: Seq[np.ndarray] = ()) -> Frame:
        """Ask and wait."""
        return self.post(operation, header or {}, arrays).result()

    def close(self) -> None:
        """End the process: politely, then by its process id. Calling it again does nothing."""
        self._closing = True
        if self._dead is None:
            with suppress(WireError):  # it may have ended by itself
                self._channel.try_send({"op": "close", "id": -1})
            try:
                self._process.wait(_CLOSE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._lost(WireError("it was closed"))
        self._finalizer()
        if threading.current_thread() is not self._reader:
            self._reader.join(_CLOSE_S)
        self._log.close()

    # --- the reader's thread ------------------------------------------------------------------------------------------

    def _take(self, frame: Frame) -> None:
        self._heard = time.monotonic()
        self.version = frame.header["version"]
        with self._lock:
            asked = self._asked.pop(frame.header["id"], None)
        if asked is None:
            return  # a ping's answer
        if (error := frame.header.get("error")) is None:
            asked.answer.set_result(frame)
        else:
            asked.answer.set_exception(_typed(error))

    def _tick(self) -> None:
        """Nothing came for a moment: is the process there, and has it been silent for too long?"""
        if (code := self._process.poll()) is not None:
            raise WireError(f"it ended with exit code {code}")
        with self._lock:
            oldest = min((asked.since for asked in self._asked.values()), default=None)
            waiting = sorted({asked.operation for asked in self._asked.values()})
        if oldest is None:
            return
        now = time.monotonic()
        if now - max(oldest, self._heard) > self._patience_s:
            raise _Silent(f"it gave no sign of life for {self._patience_s:g} s while asked to {', '.join(waiting)}")
        if now - self._pinged > self._patience_s / 4 and self._channel.try_send({"op": "ping", "id": -1}):
            self._pinged = now

    def _lost(self, error: Exception) -> None:
        """The process is no more, or no use: end it and fail everything that was asked."""
        with self._lock:
            if self._dead is not None:
                return
            if not isinstance(error, _Silent):
                with suppress(subprocess.TimeoutExpired):  # an end that has begun keeps its own exit code
                    self._process.wait(_EXIT_S)
            self._process.kill()
            code, what = self._process.wait(), "it was closed" if self._closing else str(error)
            ended = f"exit code {code}" if code >= 0 else f"signal {-code}"
            self._dead = f"the engine's process {self._process.pid} is gone ({ended}): {what}{self._last_words()}"
            asked, self._asked = list(self._asked.values()), {}
        self._channel.close()
        for one in asked:
            one.answer.set_exception(EngineProcessError(self._dead))

    def _last_words(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        words = os.pread(self._log.fileno(), _LAST_WORDS_BYTES, max(0, size - _LAST_WORDS_BYTES))
        text = mask_text(words.decode(errors="replace").strip(), self._secrets)
        return f"; its last words:\n{text}" if text else ""


def _read(process: weakref.ref[EngineProcess], channel: Channel) -> None:
    """The thread: hands every frame to the process' object while there is one."""

    def owner() -> EngineProcess:
        if (alive := process()) is None:
            raise WireError("nobody owns it any more")
        return alive

    try:
        while True:
            frame = channel.receive(lambda: owner()._tick())
            owner()._take(frame)
            del frame
    except (WireError, ValueError, KeyError) as error:
        if (alive := process()) is not None:
            alive._lost(error)


def _typed(error: dict[str, str]) -> Exception:
    kind = _KNOWN_ERRORS.get(error["type"])
    if kind is None:
        return EngineProcessError(f"in the engine's process: {error['type']}: {error['text']}")
    return kind(error["text"])


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def importable(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a child can import this package."""
    package_root = str(Path(__file__).resolve().parents[2])
    inherited = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": os.pathsep.join([package_root, inherited] if inherited else [package_root])}
