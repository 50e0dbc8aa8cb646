"""Evidence that several recipes cite for bounds on hardware where nothing was measured."""

from __future__ import annotations

FLOAT32_ON_CUDA = (
    "torch multiplies float32 matrices in float32 by default on a GPU too (no TF32), so as on a CPU only the order of "
    "sums differs; slime holds aligned kernels to 1e-6 (THUDM/slime)"
)

DEEPSEEK_V4_ROLLOUT_MEAN = (
    "miles#2040, DeepSeek-V4-Flash in fp8 on 4 × 8 MI355X, tp8 pp4 ep8, triton backend, 16384 tokens, step 0: 0.0448 "
    "where it is healthy, 0.1311 with one of two faults mended, 0.2129 with both. No evidence for tp4 with "
    "unified_kv_triton (miles#2139 publishes none), nor for NVIDIA devices"
)
DEEPSEEK_V4_PROB_DIFF = (
    "verl#7224, DeepSeek-V4-Flash in fp8 with mxfp4 experts on 32 NVIDIA devices, step 1: 0.0102 at the mean; "
    "verl#7050 on AMD devices, step 3: 0.0070. Probabilities, not log-probs: no evidence for a bound on abs_diff"
)
SLIME_CI_BF16 = (
    "slime's continuous integration accepts train_rollout_logprob_abs_diff up to 0.1 (THUDM/slime, ci_test), for dense "
    "and MoE models in bfloat16; no number for this model has been published"
)
