"""A grader's child process: reads pickled requests from stdin, writes one line of JSON per request to stdout.

``python -m lockstep.tasks.grader_worker math 5.0`` grades ``(gold, text)``; ``… reasoning_gym 5.0`` grades
``(dataset, options, answer, entry)``. The parent is trusted, the graded text is not: symbolic engines expand towers of
powers for ever (huggingface/Math-Verify#65), and some upstream graders hand the model's text to ``eval`` or to sympy's
``parse_expr``, which evaluates it. So the process

- ends itself by a kernel timer a moment after its time is up, even if its parent is gone and even in C code;
- may not use more than ``MEMORY_BYTES`` of address space;
- refuses, by an audit hook, to start processes, write or remove files and open sockets. That stops accidents and
  simple exploits; it is not a sandbox.

It imports nothing heavy: no torch, no configuration.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any

MEMORY_BYTES = 4 << 30
"""Address space of a worker. A grader that needs more fails with MemoryError, which is an error, not a wrong answer."""

GRACE_S = 1.0
"""How long after its time limit a worker ends itself; the parent kills it before that if it is still there."""

HEADER = struct.Struct("<Q")
"""Length of the pickled request that follows."""

_FORBIDDEN = (
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "subprocess.Popen",
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "os.kill", "os.putenv", "shutil.", "socket.", "ctypes.", "pty.spawn", "ftplib.", "urllib.",
)  # fmt: skip


def _refuse_side_effects(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook (PEP 578)."""
    if event == "open":
        mode, flags = arguments[1], arguments[2]
        writes = any(sign in mode for sign in "wax+") if isinstance(mode, str) else flags & (os.O_WRONLY | os.O_RDWR)
        if writes:
            raise PermissionError(f"a grader tried to write {arguments[0]!r}")
    elif event.startswith(_FORBIDDEN):
        raise PermissionError(f"a grader tried {event}")


def _load(kind: str) -> Callable[[Any], float]:
    if kind == "math":
        from lockstep.tasks.math_rules import grade

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that its own alarm is off: ours replaces it
        return lambda request: grade(*request)
    if kind == "reasoning_gym":
        from lockstep.tasks.gym_items import harden, score

        harden()
        return lambda request: score(*request)
    raise ValueError(f"unknown grader {kind!r}")


def _serve(grade: Callable[[Any], float], replies: int, limit_s: float) -> None:
    while header := sys.stdin.buffer.read(HEADER.size):
        request = pickle.loads(sys.stdin.buffer.read(HEADER.unpack(header)[0]))
        signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)  # SIGALRM is not handled: the kernel ends the process
        out_of_memory = False
        try:
            reply: dict[str, Any] = {"score": float(grade(request))}
        except MemoryError:
            reply, out_of_memory = {"error": "MemoryError: the grader needs too much memory"}, True
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(replies, json.dumps(reply).encode() + b"\n")
        if out_of_memory:
            return  # what is left of the heap is nothing to go on with; the parent starts a fresh process


def main() -> None:
    """Serve until stdin ends. Ctrl-C is the parent's business: it finishes its step and then closes this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    replies = os.dup(1)
    os.dup2(2, 1)  # a library that prints must not write into the protocol
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    grade = _load(sys.argv[1])
    sys.addaudithook(_refuse_side_effects)
    os.write(replies, b"ready\n")
    _serve(grade, replies, float(sys.argv[2]))


if __name__ == "__main__":
    main()
