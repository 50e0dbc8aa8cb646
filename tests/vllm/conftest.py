"""Tests of the real vLLM, in the environment of ``make setup-vllm``. Without vLLM they fail, never skip."""

from __future__ import annotations

from lockstep.rollout.vllm_start import import_vllm

import_vllm()
