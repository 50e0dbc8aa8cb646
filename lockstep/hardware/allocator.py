"""Keep freed memory in the process: on a CPU, fresh pages cost training a third of its time.

glibc returns large blocks to the kernel when they are freed and takes new, zeroed pages for the next ones; a training
step frees and takes all of its activations. Measured on a GRPO batch of SmolLM2-135M (924 tokens, bfloat16, one
thread): 307,000 page faults and 5.8 CPU seconds a forward-backward, against none and 3.9 with the settings here, at
0.1 GB more peak memory.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h of glibc


def keep_freed_pages() -> bool:
    """Tell glibc's malloc to reuse freed blocks of any size. False, and no change, where the C library isn't glibc."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 << 20))
    return all(library.mallopt(option, value) == 1 for option, value in settings)
