"""Freed blocks are used again instead of being faulted in anew."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from lockstep.hardware.allocator import keep_freed_pages
if sys.argv[1] == "keep":
    assert keep_freed_pages()
torch.set_num_threads(1)
def step():  # takes activations of many sizes and frees them all
    kept = [torch.ones((1 << 20) * (1 + index % 7)) for index in range(12)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    command = [sys.executable, "-c", SCRIPT, mode]
    # A fixed threshold: by default glibc moves it, and how many pages come back depends on luck.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_large_tensors_reuse_their_pages() -> None:
    pages = 3 * sum(1 + index % 7 for index in range(12)) * (4 << 20) // resource.getpagesize()
    assert faults("default") > 0.9 * pages
    assert faults("keep") < 0.01 * pages
