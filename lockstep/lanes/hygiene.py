"""What a test leaves behind: variables, processes, GPU memory. Found after each test, named, charged to it, put right.

Fixtures wider than a test may change variables and start processes that live on; such changes belong to the fixture as
long as it lives. Processes are found below this one: it makes itself the reaper of orphans (Linux), so a process that
detaches from its parent stays in sight. Only these, which a test of this run started, are ever ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.lanes.machine import Run, run_tool

IGNORED_VARIABLES = ("PYTEST_CURRENT_TEST",)
PYTHON_HELPERS = ("*multiprocessing.resource_tracker*", "*multiprocessing.forkserver*")
"""Processes that Python keeps for the whole program once something needed them."""

PR_SET_CHILD_SUBREAPER = 36
"""Of ``prctl(2)``."""

GRACE_S = 0.5
"""How long a process that is about to end has until it counts as left behind."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process by id and start time, which together are not given out again, and its command line."""

    pid: int
    started: int
    command: str


def environment() -> dict[str, str]:
    """The variables of this process, without pytest's own."""
    return {name: value for name, value in os.environ.items() if name not in IGNORED_VARIABLES}


def restore_environment(wanted: Mapping[str, str], allowed: Sequence[str] = ()) -> list[str]:
    """Put the variables back to ``wanted``, except allowed ones; what had to be put back, in words."""
    now = environment()
    left: list[str] = []
    for name in sorted(now.keys() | wanted.keys()):
        before, after = wanted.get(name), now.get(name)
        if before == after or any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed):
            continue
        what = "set" if before is None else "unset" if after is None else "changed"
        left.append(f"variable {name} {what}")
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    return left


def become_reaper() -> bool:
    """Let orphans below this process become its children; whether that worked (it needs Linux)."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def descendants(proc: Path = Path("/proc")) -> dict[int, Process]:
    """Live processes below this one, by id. Empty where there is no ``/proc``."""
    parents: dict[int, int] = {}
    started: dict[int, int] = {}
    for folder in proc.glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it ended while we looked
        fields = text.rpartition(")")[2].split()
        if len(fields) > 19 and fields[0] not in ("Z", "X"):
            parents[int(folder.name)], started[int(folder.name)] = int(fields[1]), int(fields[19])
    below: dict[int, Process] = {}
    frontier = {os.getpid()}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier and pid not in below}
        below |= {pid: Process(pid, started[pid], _command(proc / str(pid))) for pid in frontier}
    return below


def _command(folder: Path) -> str:
    try:
        return (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip() or "(no name)"
    except OSError:
        return "(ended)"


def end_processes(processes: Sequence[Process]) -> None:
    """Kill processes that a test left, children of this run, and collect them; one whose id was reused is let be."""
    now = descendants()
    for process in processes:
        same = now.get(process.pid)
        if same is not None and same.started == process.started:
            os.kill(process.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # its own parent lives and collects it
                os.waitpid(process.pid, 0)


def gpu_memory_mib(vendor: str, run: Run = run_tool) -> float | None:
    """Memory in use on all GPUs together, in MiB, by the driver's tool; None if it does not say."""
    if vendor == "cuda":
        output = run(("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"))
        numbers = [line.strip() for line in (output or "").splitlines() if line.strip()]
        return sum(map(float, numbers)) if numbers and all(n.replace(".", "").isdigit() for n in numbers) else None
    if vendor != "rocm":
        return None
    try:
        cards = json.loads(run(("rocm-smi", "--showmeminfo", "vram", "--json")) or "")
        used = [float(card["VRAM Total Used Memory (B)"]) for name, card in cards.items() if name.startswith("card")]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return sum(used) / 2**20 if used else None


def release_own_gpu_memory() -> None:
    """Let go of what only caches hold in this process, so that what remains is really in use."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@dataclass
class Watch:
    """Looks after a run: what belongs to living fixtures, and what each test leaves beyond that."""

    vendor: str = "cpu"
    env_allowed: Sequence[str] = ()
    processes_allowed: Sequence[str] = ()
    slack_mib: float = 1024.0
    run: Run = run_tool
    expected: dict[str, str] = field(default_factory=dict)
    fixtures: dict[object, tuple[dict[str, str | None], set[int], float]] = field(default_factory=dict)
    known: dict[int, Process] = field(default_factory=dict)
    memory_mib: float | None = None

    def start(self) -> None:
        """Remember how things are before the first test."""
        become_reaper()
        self.expected = environment()
        self.known = descendants()
        self.memory_mib = gpu_memory_mib(self.vendor, self.run)

    def fixture_was_set_up(self, key: object, before: Mapping[str, str], pids: set[int]) -> None:
        """What changed while a fixture wider than a test was set up belongs to it until ``fixture_ended``."""
        after = environment()
        changed = {
            name: before.get(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        }
        started = {pid: process for pid, process in descendants().items() if pid not in pids}
        self.fixtures[key] = (changed, set(started), self._memory_grown())
        self.known |= started
        for name in changed:
            if name in after:
                self.expected[name] = after[name]
            else:
                self.expected.pop(name, None)

    def fixture_ended(self, key: object) -> None:
        """A wider fixture is gone: from now on its changes are left-overs."""
        changed, pids, mib = self.fixtures.pop(key, ({}, set(), 0.0))
        if self.memory_mib is not None:
            self.memory_mib -= mib
        for name, value in changed.items():
            if value is None:
                self.expected.pop(name, None)
            else:
                self.expected[name] = value
        for pid in pids:
            self.known.pop(pid, None)

    def after_test(self) -> list[str]:
        """What the test left, in words, after it has been put right: variables restored, processes ended."""
        left = restore_environment(self.expected, self.env_allowed)
        strangers = self._strangers()
        left += [f"process {one.pid}: {one.command[:160]}" for one in strangers]
        end_processes(strangers)
        return left + self._memory()

    def _strangers(self) -> list[Process]:
        allowed = (*PYTHON_HELPERS, *self.processes_allowed)
        deadline = time.monotonic() + GRACE_S
        while True:
            found = [
                process
                for pid, process in descendants().items()
                if (pid not in self.known or self.known[pid].started != process.started)
                and not any(fnmatch.fnmatchcase(process.command, pattern) for pattern in allowed)
            ]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    def _memory_grown(self) -> float:
        """MiB taken since the last look, which from now on belong to the fixture that was set up."""
        now = None if self.memory_mib is None else gpu_memory_mib(self.vendor, self.run)
        if now is None or self.memory_mib is None:
            return 0.0
        grown = max(now - self.memory_mib, 0.0)
        self.memory_mib += grown
        return grown

    def _memory(self) -> list[str]:
        if self.memory_mib is None:
            return []
        release_own_gpu_memory()
        before, now = self.memory_mib, gpu_memory_mib(self.vendor, self.run)
        if now is None:
            return ["GPU memory can't be read any more"]
        self.memory_mib = now  # charged once: the next test starts from what is left
        return [f"{now - before:.0f} MiB of GPU memory"] if now - before > self.slack_mib else []
