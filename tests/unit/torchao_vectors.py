"""What torchao 0.18.0 makes of fixed inputs, as digests: the quantiser is held to the same bytes without torchao here.

torchao is no dependency, not even of the tests: once it is installed, transformers imports it with every model. The
digests below are what this prints in an environment that has it: ``python -m tests.unit.torchao_vectors``.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

SHAPE = (384, 256)
SEEDS = (1, 2, 3)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

TORCHAO = {
    "fp8 float32 1": "e9eee98ac86cc556479ca8ea3d7ba564",
    "mxfp4 float32 1": "a3cf017d33361dbbda7e144abad342da",
    "fp8 bfloat16 1": "77ea2cec724292244863af4bb3b28650",
    "mxfp4 bfloat16 1": "b29944d606db00f168892ac219400307",
    "fp8 float32 2": "ffcbe6233dff42551210ba29b8e2a14d",
    "mxfp4 float32 2": "bb3617a91f45e37187d2adb6896223f2",
    "fp8 bfloat16 2": "b4d9fe56ce2e9d75529ffb92b6d584c8",
    "mxfp4 bfloat16 2": "bd9f2b24f7e1ffc8850f248553bd8685",
    "fp8 float32 3": "dde72b779b4cfa2ec76cab42aceadc8e",
    "mxfp4 float32 3": "141e5d1bdffeea7e55115eca4c6d2196",
    "fp8 bfloat16 3": "9e7c8224fe5cca1090f209db1f6d5643",
    "mxfp4 bfloat16 3": "bb6624413779c6b41f04f2f905d9ee1e",
}


def values(seed: int, dtype: str) -> torch.Tensor:
    """Floats of both signs over 24 powers of two, zeros of both signs among them, by integer arithmetic alone."""
    index = np.arange(SHAPE[0] * SHAPE[1], dtype=np.uint64)
    mixed = (index + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    pattern = (mixed & np.uint64(0x807FFFFF)).astype(np.uint32)
    exponent = (np.uint32(110) + (mixed >> np.uint64(40)).astype(np.uint32) % np.uint32(24)) << np.uint32(23)
    floats = (pattern | exponent).view(np.float32).copy()
    floats[::97], floats[5::97] = 0.0, -0.0
    return torch.from_numpy(floats.reshape(SHAPE)).to(DTYPES[dtype])


def digest(*tensors: torch.Tensor) -> str:
    """SHA-256 of the bytes of tensors, the first 32 digits."""
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:32]


def of_torchao() -> dict[str, str]:
    """The digests, by torchao: fp8 in 128 × 128 blocks, mxfp4 with RCEIL scales, each with what it dequantises to."""
    from torchao.prototype.mx_formats.mx_tensor import (  # pyright: ignore[reportMissingImports]
        ScaleCalculationMode,
        to_dtype,
        to_mx,
    )
    from torchao.quantization.quant_primitives import (  # pyright: ignore[reportMissingImports]
        _choose_scale_float8,
        _dequantize_affine_float8,
        _quantize_affine_float8,
    )

    found: dict[str, str] = {}
    for seed in SEEDS:
        for dtype in DTYPES:
            x = values(seed, dtype)
            # In float32: a bfloat16 amax would be divided in bfloat16, and the format has a float32 scale.
            scale = _choose_scale_float8(x.float(), [128, 128])
            codes = _quantize_affine_float8(x, scale)
            found[f"fp8 {dtype} {seed}"] = digest(codes, scale, _dequantize_affine_float8(codes, scale))
            element = torch.float4_e2m1fn_x2
            powers, packed = to_mx(x, element, 32, ScaleCalculationMode.RCEIL)
            back = to_dtype(packed, powers, element, 32, torch.float32)
            found[f"mxfp4 {dtype} {seed}"] = digest(packed, powers, back)
    return found


if __name__ == "__main__":
    for name, text in of_torchao().items():
        print(f'    "{name}": "{text}",')
