"""What a process keeps of the memory that it has used: freed pages yes, compiled matrix products no.

Pages. glibc returns large blocks to the kernel when they are freed and takes new, zeroed pages for the next ones; a
training step frees and takes all of its activations. Measured on a GRPO batch of SmolLM2-135M (924 tokens, bfloat16,
one thread): 307,000 page faults and 5.8 CPU seconds a forward-backward, against none and 3.9 with the settings here,
at 0.1 GB more peak memory.

Matrix products. oneDNN compiles one primitive per shape and keeps 1024 of them, with their scratch space. Packed
batches have new shapes at every step, so a run grew by 42 MB a step (SmolLM2-135M, 22 steps: 0.9 GB) for entries that
are hardly ever used again; a step's layers share their few shapes, so a small cache loses nothing that was measured.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # malloc.h of glibc

PRIMITIVE_CACHE_VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
"""oneDNN's variable (its documentation, *Primitive Cache*); read once, at the first primitive of the process."""

NUM_CACHED_PRIMITIVES = 32


def keep_freed_pages() -> bool:
    """Tell glibc's malloc to reuse freed blocks of any size. False, and no change, where the C library isn't glibc."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 << 20))
    return all(library.mallopt(option, value) == 1 for option, value in settings)


def share_one_heap() -> bool:
    """Let threads use the heap whose pages ``keep_freed_pages`` keeps: in heaps of their own (of at most 64 MB) large
    blocks are new pages each time. For a few threads that allocate large blocks; to be called before they start. False,
    and no change, where the C library isn't glibc."""
    library = ctypes.CDLL(None)
    return hasattr(library, "gnu_get_libc_version") and library.mallopt(_M_ARENA_MAX, 1) == 1


class KeptPages:
    """Pages of the shared heap that are free and still the process's: what ``keep_freed_pages`` costs.

    Not thread-safe. Where glibc can't say (before 2.33), or in another C library, there are none as far as is known.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._can_say = hasattr(self._library, "mallinfo2") and hasattr(self._library, "malloc_trim")
        if self._can_say:
            self._library.mallinfo2.restype = _Mallinfo2
        self._returned = 0

    def num_bytes(self) -> int:
        """An estimate: free bytes of the heap, less those that ``give_back`` gave and nobody has used since."""
        free = self._free()
        self._returned = min(self._returned, free)
        return free - self._returned

    def give_back(self) -> None:
        """Return them to the operating system; they stay free blocks of the heap and are faulted in when used again."""
        if self._can_say:
            self._library.malloc_trim(0)
            self._returned = self._free()

    def _free(self) -> int:
        return int(self._library.mallinfo2().fordblks) if self._can_say else 0


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    )


def bound_primitive_cache() -> None:
    """Keep ``NUM_CACHED_PRIMITIVES`` compiled matrix products instead of oneDNN's 1024, unless the environment says
    otherwise. To be called before the process' first matrix product; later it has no effect."""
    os.environ.setdefault(PRIMITIVE_CACHE_VARIABLE, str(NUM_CACHED_PRIMITIVES))
