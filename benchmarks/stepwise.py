"""Two training programs in two processes, stepped in turn: while one works, the other waits in a blocking read.

    parent                          child
    Side.start ───── spawns ──────▶ loads its model …           StepGate()
           ◀──────── ready ──────── … and stands before step 1  gate.wait()
    Side.step  ───── "go" ────────▶ one whole step
           ◀──────── row ────────── gate.finish(row): seconds from "go" to here, then waits again

So noise of the machine hits both sides, and the peak memory of each is its process' own. The child's standard output
carries rows only; whatever its libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from lockstep.hardware.cpu import peak_rss_bytes

ROOT = Path(__file__).parents[1]


class BenchmarkError(RuntimeError):
    """A side died, or the two sides did not do the same work."""


class Side:
    """The parent's end: a child process that runs one step at a time. Use as a context manager."""

    def __init__(self, name: str, command: Sequence[str], log: Path, threads: int) -> None:
        self.name, self.log = name, log
        variables = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def read(self) -> dict[str, Any]:
        """The child's next row. Raises BenchmarkError with the end of its log if it died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            end = "\n".join(self.log.read_text().splitlines()[-20:])
            raise BenchmarkError(f"{self.name} ended with exit code {code}; the end of {self.log}:\n{end}")
        return json.loads(line)

    def step(self) -> dict[str, Any]:
        """Let the child run one step and read its row."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self.read()


class StepGate:
    """The child's end. Takes standard output for itself at construction."""

    def __init__(self) -> None:
        self._rows = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._released_s = self._released_cpu_s = 0.0

    def wait(self, **ready: Any) -> None:
        """Say that step 1 may begin, with facts about this side, and wait for "go"."""
        self._send(ready)
        self._hold()

    def finish(self, **row: Any) -> None:
        """Report a step with its seconds and this process' peak memory, and wait for the next "go"."""
        seconds = time.perf_counter() - self._released_s
        cpu_seconds = time.process_time() - self._released_cpu_s
        self._send({"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_rss_bytes": peak_rss_bytes(), **row})
        self._hold()

    def _send(self, row: dict[str, Any]) -> None:
        self._rows.write(json.dumps(row) + "\n")
        self._rows.flush()

    def _hold(self) -> None:
        if sys.stdin.readline() != "go\n":
            _leave()
        self._released_s, self._released_cpu_s = time.perf_counter(), time.process_time()


def _leave() -> NoReturn:
    """The parent is done with this process, in whose middle of a run there is nothing to save."""
    os._exit(0)
