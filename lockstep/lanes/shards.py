"""Divide tests over machines by time, longest first: each test is in exactly one shard.

Graham's bound: the longest shard takes at most 4/3 − 1/(3m) times what the best division over m shards takes
(R. L. Graham, *Bounds on Multiprocessing Timing Anomalies*, 1969).
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Mapping, Sequence

from lockstep.lanes.errors import LanesError


def split(minutes: Mapping[str, float], num_shards: int) -> list[list[str]]:
    """Names by shard. The same input gives the same division on every machine, whatever its order."""
    if num_shards < 1:
        raise LanesError(f"a division into {num_shards} shards; at least 1")
    shards: list[list[str]] = [[] for _ in range(num_shards)]
    loads = [(0.0, index) for index in range(num_shards)]
    for name in sorted(minutes, key=lambda name: (-minutes[name], name)):
        load, index = heapq.heappop(loads)
        shards[index].append(name)
        heapq.heappush(loads, (load + minutes[name], index))
    return shards


def num_shards_for(minutes: Sequence[float], target_minutes: float, max_shards: int) -> int:
    """So many shards that one takes about ``target_minutes``; no more than tests, at least one."""
    return max(1, min(math.ceil(sum(minutes) / target_minutes), max_shards, len(minutes)))


def parse_shard(text: str) -> tuple[int, int]:
    """(index from 0, number) of ``1/3``. Raises ``LanesError``."""
    first, slash, second = text.partition("/")
    if not (slash and first.isdecimal() and second.isdecimal()) or not 1 <= int(first) <= int(second):
        raise LanesError(f"--shard {text}: expected K/N with 1 ≤ K ≤ N, such as 1/3")
    return int(first) - 1, int(second)


def shard_of_unplanned(test_id: str, num_shards: int) -> int:
    """The shard of a test that only collection finds (inherited, generated): by its name, equal on every machine."""
    return zlib.crc32(test_id.encode()) % num_shards
