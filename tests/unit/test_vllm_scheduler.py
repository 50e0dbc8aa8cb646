"""What a computation that went NaN leaves in vLLM's cache, without vLLM: a scheduler over caches of this test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.rollout.vllm_scheduler import VllmScheduler

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)


class Engine:
    """Whose prefix cache may be in use still."""

    def __init__(self, free: bool) -> None:
        self._free = free

    def reset_prefix_cache(self) -> bool:
        return self._free

    def reset_mm_cache(self) -> None: ...


def scheduler(free: bool = True) -> tuple[VllmScheduler, list[torch.Tensor]]:
    """With caches of every type whose every byte is 255: NaN in all of them, bare and in layers of two states."""
    bytes_ = [torch.full((4, 16), 255, dtype=torch.uint8) for _ in range(2 * len(DTYPES))]
    caches = [one.view(dtype) for one, dtype in zip(bytes_, 2 * DTYPES, strict=True)]
    subject: Any = object.__new__(VllmScheduler)
    subject._engine, subject._started, subject._not_finite = Engine(free), {}, False
    subject._runner = SimpleNamespace(kv_caches=[*caches[: len(DTYPES)], caches[len(DTYPES) :]])
    return subject, bytes_


@pytest.mark.parametrize("by", ["refit", "idle"])
def test_after_nan_no_byte_of_any_cache_is_left(by: str) -> None:
    one, caches = scheduler()
    one.note_not_finite()
    one.drop_caches() if by == "refit" else one.step(admit=False)
    assert [int(cache.count_nonzero()) for cache in caches] == [0] * len(caches)
    caches[0].fill_(1)
    one.drop_caches()
    assert bool(caches[0].all()), "clean already"


def test_caches_in_use_or_without_nan_are_left() -> None:
    one, caches = scheduler()
    one.drop_caches()
    one.step(admit=False)
    used, others = scheduler(free=False)
    used.note_not_finite()
    used.step(admit=False)
    assert all(bool((cache == 255).all()) for cache in (*caches, *others))
