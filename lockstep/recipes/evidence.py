"""Evidence that several recipes cite for bounds on hardware where nothing was measured."""

from __future__ import annotations

FLOAT32_ON_CUDA = (
    "torch multiplies float32 matrices in float32 by default on a GPU too (no TF32), so as on a CPU only the order of "
    "sums differs; slime holds aligned kernels to 1e-6 (THUDM/slime)"
)
