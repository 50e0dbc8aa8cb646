"""The base of all sections of a configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Dtype = Literal["bfloat16", "float32"]
Quantisation = Literal["none", "fp8", "fp8_ue8m0", "mxfp4_experts"]


class Section(BaseModel):
    """Base of all sections: frozen, closed, strict about types (no "3" for 3, no 1 for true)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
