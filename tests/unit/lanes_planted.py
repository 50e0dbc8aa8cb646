"""Planted repositories for the tests of lanes: a small catalogue, test files, git, fake driver tools, pytest runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.lanes.evidence import Run, read_runs

CATALOGUE = """
packages = ["mine"]
default_lane = "cpu"
default_minutes = 0.05
always_run = ["tests/test_always.py"]
stages = ["cpu", "one-gpu", "several", "nightly"]
changes = [{files = ["docs/*"], tests = ["tests/test_docs.py"]}, {files = ["*.lock"], tests = ["tests"]}]
[lanes.cpu]
stage = "cpu"
[lanes.cpu-long]
stage = "cpu"
[lanes.one]
stage = "one-gpu"
num_gpus = 1
[lanes.four]
stage = "several"
num_gpus = 4
[lanes.night]
stage = "nightly"
num_gpus = 4
limit_minutes = 180
[hardware.h200]
vendor = "cuda"
family = "sm90"
device_names = ["NVIDIA H200"]
[hardware.mi300x]
vendor = "rocm"
family = "gfx942"
device_names = ["*MI300X*"]
[hardware.mi350]
vendor = "rocm"
family = "gfx950"
device_names = ["*MI350X*"]
[images]
cuda = {family = "sm90", dockerfile = "docker/Dockerfile.cuda", reference = "lanes:cuda"}
mi300x = {family = "gfx942", dockerfile = "docker/Dockerfile.rocm", reference = "lanes:gfx942"}
mi350 = {family = "gfx950", dockerfile = "docker/Dockerfile.rocm", reference = "lanes:gfx950"}
[runners]
cpu = {hardware = "cpu", labels = ["ubuntu-24.04"]}
h200-1 = {hardware = "h200", num_gpus = 1, labels = ["self-hosted", "h200-1"], image = "cuda"}
h200-4 = {hardware = "h200", num_gpus = 4, labels = ["self-hosted", "h200-4"], image = "cuda"}
mi300x-1 = {hardware = "mi300x", num_gpus = 1, labels = ["self-hosted", "mi300x-1"], image = "mi300x"}
mi350-4 = {hardware = "mi350", num_gpus = 4, labels = ["self-hosted", "mi350-4"], image = "mi350"}
[labels]
run-amd = {vendors = ["rocm"]}
run-h200 = {hardware = ["h200"]}
run-nightly = {stages = ["nightly"]}
replay = {}
megatron = {}
"""

HEAD = "import os\nimport pytest\nfrom lockstep.lanes import Disabled\n"


@dataclass(frozen=True)
class Ended:
    """How a run of pytest ended, what it printed, and the evidence it left."""

    code: int
    output: str
    runs: list[Run]


def plant(root: Path, files: dict[str, str], catalogue: str = CATALOGUE) -> Path:
    """Write a repository: ``files`` by name, ``lanes.toml``, and an empty package ``mine``."""
    for name, text in {"lanes.toml": catalogue, "mine/__init__.py": "", "tests/.keep": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def mark(lane: str = "one", hardware: str = '{"cuda": "h200"}', minutes: float = 5, more: str = "") -> str:
    """The text of a mark."""
    tail = f", {more}" if more else ""
    return f'@pytest.mark.lane("{lane}", hardware={hardware}, minutes={minutes}, owner="me"{tail})\n'


def git(root: Path, *arguments: str) -> None:
    """A git command in a repository with a name and without the user's settings."""
    identity = ["-c", "user.name=A Tester", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


def commit(root: Path) -> Path:
    """Commit everything, on branch main."""
    if not (root / ".git").exists():
        git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "planted", "--allow-empty")
    return root


def run_pytest(root: Path, *arguments: str, **environment: str) -> Ended:
    """pytest with the lanes plugin in a process of its own, in a planted repository."""
    others = [word for name in ("cacheprovider", "anyio", "hypothesispytest") for word in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "pytest", "-p", "lockstep.lanes.plugin", *others, *arguments]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "PYTEST_"))}
    done = subprocess.run(
        command, cwd=root, env=clean | environment, capture_output=True, text=True, timeout=120, check=False
    )
    return Ended(done.returncode, done.stdout + done.stderr, read_runs([root / "lanes/evidence"]))


def fake_tool(folder: Path, name: str, script: str) -> str:
    """A program of this name in ``folder``; returns a PATH in which it comes first."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def fake_gpus(folder: Path, name: str = "NVIDIA H200", count: int = 1) -> str:
    """A PATH on which ``nvidia-smi`` prints so many devices, and memory from the file ``used`` beside it."""
    lines = "\n".join([name] * count)
    script = f"""case "$1" in
*memory*) cat {folder}/used 2>/dev/null || echo 0 ;;
*driver*) echo 570.86 ;;
*) printf '%s\\n' '{lines}' ;;
esac"""
    return fake_tool(folder, "nvidia-smi", script)


def lanes(root: Path, *arguments: str) -> tuple[int, str, str]:
    """``lockstep lanes …`` in a planted repository: exit code, stdout, stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.cli", "lanes", *arguments],
        cwd=root, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def lanes_json(root: Path, *arguments: str) -> Any:
    """The JSON that a command prints."""
    return json.loads(lanes(root, *arguments)[1])
