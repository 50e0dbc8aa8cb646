"""``lockstep refit check --engine vllm``: it passes for the real engine, and finds both public faults where planted.

The faults: transformers' fused expert names, which vLLM's loader ignores with success, and (CPU build) an expert kernel
that is not laid out again at a reload.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.lane(
    "stage-a-vllm", hardware={"cpu": "cpu"}, minutes=2, owner="vllm", labels=["refit", "vllm"]
)


def check(*arguments: str) -> tuple[int, dict[str, Any]]:
    """In a process of its own: three engines and their memory end with it."""
    command = [sys.executable, "-m", "lockstep", "refit", "check", *arguments, "--engine", "vllm", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    lines = done.stdout.strip().splitlines()
    assert lines, done.stderr[-3000:]
    return done.returncode, json.loads(lines[-1])


@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-qwen3-moe", "tiny-glm4-moe", "tiny-deepseek-v3"])
def test_vllm_passes(model: str) -> None:
    code, told = check(model)
    assert code == 0, json.dumps(told["rounds"], indent=1)[:4000]
    for one in told["rounds"]:
        assert one["measured"]["prefill_mean"] < 1e-5
        assert one["measured"]["decode_mean"] < 1e-5
        assert one["measured"]["power"] > 1e-2


def test_a_plain_push_of_fused_names_is_found_by_the_experts() -> None:
    code, told = check("tiny-qwen3-moe", "--plain-push")
    assert code == 1
    assert "layers.0.mlp" in told["rounds"][0]["first"]["module"]
    claims = {claim["name"]: claim["status"] for claim in told["rounds"][0]["claims"]}
    assert claims["behaves"] == claims["disk"] == "failed"


def test_without_the_registry_the_stale_expert_kernel_is_found() -> None:
    code, told = check("tiny-qwen3-moe", "--without-derived")
    assert code == 1
    failed = [one for one in told["rounds"] if one["first"] or one["refused"]]
    assert failed, told
    assert any("layers.0.mlp" in (one["first"] or {}).get("module", "") for one in failed)


def test_a_model_that_vllm_cannot_serve_is_bad_usage_with_vllms_own_words() -> None:
    """The CPU build does not run DeepSeek-V4."""
    command = [sys.executable, "-m", "lockstep", "refit", "check", "tiny-deepseek-v4", "--engine", "vllm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    assert "vLLM can't serve a model of type deepseek_v4 here: " in done.stderr
