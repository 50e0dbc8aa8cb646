"""Freed blocks are used again instead of being faulted in anew, and matrix products of old shapes are let go."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys

import pytest

from lockstep.hardware.allocator import PRIMITIVE_CACHE_VARIABLE, bound_primitive_cache

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


KEPT = """
import torch
from lockstep.hardware.allocator import KeptPages, keep_freed_pages, share_one_heap
keep_freed_pages(), share_one_heap()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
kept, start, before = KeptPages(), KeptPages().num_bytes(), resident()
blocks = [torch.ones(8 << 20) for _ in range(10)]
held = blocks[::2]
while blocks:  # every second one is freed, and lies between those that are held
    blocks.pop()
print(kept.num_bytes() - start, resident() - before)
kept.give_back()
print(kept.num_bytes(), resident() - before)
again = torch.ones(8 << 20)
print(kept.num_bytes(), resident() - before)
del again
print(kept.num_bytes(), resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the count is glibc's")
def test_kept_pages_are_counted_and_given_back_from_between_blocks_that_are_held() -> None:
    done = subprocess.run([sys.executable, "-c", KEPT], check=True, capture_output=True, text=True)
    found = [[int(word) / (32 << 20) for word in line.split()] for line in done.stdout.splitlines()]
    (kept, resident), (kept_after, resident_after), (_, resident_again), (kept_again, _) = found
    assert resident == pytest.approx(10, abs=0.2)
    assert 5 <= kept < 7.2, "the freed ones, and at most the 64 MB by which the heap is extended beforehand"
    assert (kept_after, resident_after) == pytest.approx((0, 5), abs=0.2)
    assert resident_again == pytest.approx(6, abs=0.2)
    assert 1 <= kept_again < 3.2


SHAPES = """
import sys, torch
from lockstep.hardware.allocator import bound_primitive_cache
if sys.argv[1] == "bound":
    bound_primitive_cache()
torch.set_num_threads(1)
weight = torch.ones(512, 2048, dtype=torch.bfloat16)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
states = torch.ones(800, 2048, dtype=torch.bfloat16)
def step(first):  # ragged batches: no shape comes twice
    for rows in range(first, first + 150):
        torch.nn.functional.linear(states[:rows], weight)
step(10)
before = resident()
for first in (200, 400, 600):
    step(first)
print(resident() - before)
"""


def growth(mode: str, **variables: str) -> int:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ONEDNN_")} | variables
    command = [sys.executable, "-c", SHAPES, mode]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def test_new_shapes_do_not_make_a_run_grow() -> None:
    assert growth("bound") < 0.6 * growth("default")


def test_the_users_own_cache_size_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRIMITIVE_CACHE_VARIABLE, "7")
    bound_primitive_cache()
    assert os.environ[PRIMITIVE_CACHE_VARIABLE] == "7"
