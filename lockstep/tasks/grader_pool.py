"""Persistent child processes that grade, each killed and replaced when it takes too long.

Works from any thread: the limit is kept by waiting on a pipe and killing the process, never by an alarm signal, which
only the main thread may set and which C code ignores (huggingface/Math-Verify#55, huggingface/trl#5281).
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.tasks.errors import TaskError
from lockstep.tasks.grader_worker import HEADER

START_LIMIT_S = 180.0
"""Longest start of a worker: importing sympy takes a second, on a loaded machine many."""


@dataclass(frozen=True, slots=True)
class GradeResult:
    """``score`` 0 to 1, or None where grading failed; ``error`` then says why, and ``timed_out`` whether by time."""

    score: float | None
    error: str | None = None
    timed_out: bool = False


def child_environment() -> dict[str, str]:
    """Environment of a child that imports this package: one thread, and a fixed order of sets of strings."""
    package_root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([package_root, inherited] if inherited else [package_root]),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


class _Worker:
    """One child process; used by one thread at a time."""

    def __init__(self, kind: str, limit_s: float) -> None:
        self._busy = threading.Lock()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lockstep.tasks.grader_worker", kind, str(limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
        if self._read_line(START_LIMIT_S) != b"ready":
            self.kill()
            raise TaskError(
                f"the {kind} grader's process did not start (exit code {self.process.returncode}); what it wrote to "
                f"stderr says why. By hand: python -m lockstep.tasks.grader_worker {kind} {limit_s}"
            )

    def grade(self, request: Any, limit_s: float) -> GradeResult:
        payload = pickle.dumps(request)
        assert self.process.stdin is not None
        with self._busy:
            try:
                self.process.stdin.write(HEADER.pack(len(payload)) + payload)
                self.process.stdin.flush()
                line = self._read_line(limit_s)
            except (BrokenPipeError, ValueError):  # the process died, or close() was faster
                line = b""
        if line is None:
            self.kill()
            return GradeResult(None, f"TimeoutError: no verdict within {limit_s:g} s", timed_out=True)
        if not line:
            self.kill()
            return GradeResult(None, f"the grader's process ended (exit code {self.process.returncode})")
        reply = json.loads(line)
        return GradeResult(reply.get("score"), reply.get("error"))

    def _read_line(self, limit_s: float) -> bytes | None:
        """A line without its end; b"" if the process ended; None if time ran out."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        poll, deadline, line = select.poll(), time.monotonic() + limit_s, b""
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
        while not line.endswith(b"\n"):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
                return None
            piece = os.read(descriptor, 65536)
            if not piece:
                return b""
            line += piece
        return line[:-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close_pipes(self) -> None:
        """Of a dead process; waits for a thread that still reads from it (it meets the end of the pipe at once)."""
        with self._busy:
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # a request that the process never read is still in the buffer; the pipe is closed now


def _end(workers: set[_Worker]) -> None:
    while workers:
        worker = workers.pop()
        worker.kill()
        worker.close_pipes()


class GraderPool:
    """``num_workers`` processes of one kind ("math" or "reasoning_gym"), started when first needed.

    ``grade`` may be called from several threads at once. A batch in which every item runs out of time takes
    len(batch) / num_workers · timeout_s. ``close`` ends the processes; so does the end of the interpreter.
    """

    def __init__(self, kind: str, num_workers: int, timeout_s: float) -> None:
        if num_workers < 1 or not timeout_s > 0:
            raise TaskError(f"a grader needs at least 1 worker and a positive limit, not {num_workers}, {timeout_s} s")
        self.kind, self.num_workers, self.timeout_s = kind, num_workers, timeout_s
        # Last in, first out: small batches keep to the workers that have started. None stands for one that has not.
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._idle.put(None)
        self._workers: set[_Worker] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._finalizer = weakref.finalize(self, _end, self._workers)

    def grade(self, requests: Seq[Any]) -> list[GradeResult]:
        """A result for each request, in order. Raises TaskError after ``close`` or if no worker can be started."""
        if self._closed:
            raise TaskError("this grader is closed")
        if len(requests) <= 1:
            return [self._grade_one(request) for request in requests]
        with ThreadPoolExecutor(min(self.num_workers, len(requests))) as threads:
            return list(threads.map(self._grade_one, requests))

    def _grade_one(self, request: Any) -> GradeResult:
        worker = self._idle.get()
        try:
            if worker is None or worker.process.poll() is not None:
                worker = self._replace(worker)
            return worker.grade(request, self.timeout_s)
        finally:
            self._idle.put(worker)

    def _replace(self, dead: _Worker | None) -> _Worker:
        if dead is not None:
            with self._lock:
                self._workers.discard(dead)
            dead.close_pipes()
        worker = _Worker(self.kind, self.timeout_s)
        with self._lock:
            self._workers.add(worker)
            if self._closed:
                _end(self._workers)
                raise TaskError("this grader was closed while it graded")
        return worker

    @property
    def process_ids(self) -> list[int]:
        """Of the workers that run now."""
        with self._lock:
            return [worker.process.pid for worker in self._workers if worker.process.poll() is None]

    def close(self) -> None:
        """End the processes. Calling it again does nothing."""
        with self._lock:
            self._closed = True
            self._finalizer()
