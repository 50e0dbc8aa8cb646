"""Launch commands of servers alone: their repairs, their images, files of settings, and what a server does not do."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.driver.launch_commands import LaunchVerdict, plan_launch


def judged(tmp_path: Path, text: str) -> LaunchVerdict:
    script = tmp_path / "serve.sh"
    script.write_text(text + "\n")
    (verdict,) = plan_launch(script, hardware="h200").verdicts
    return verdict


def repairs(verdict: LaunchVerdict) -> dict[str, str]:
    return {finding.rule: finding.repair for finding in verdict.findings}


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("vllm serve Qwen/Qwen3-30B-A3B -tp 3", "-tp 2 on line 1"),
        ("python -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B --tp-size 6", "--tp-size 4 on line 1"),
    ],
)
def test_a_server_may_take_more_devices_of_its_node(text: str, flag: str, tmp_path: Path) -> None:
    """Only divisors of the wrong number were proposed: tp 3 → 1."""
    repair = repairs(judged(tmp_path, text))["engine-heads"]
    assert repair.endswith(f"— {flag}"), repair


def test_vllms_experts_are_spread_by_a_switch(tmp_path: Path) -> None:
    off = judged(tmp_path, "vllm serve Qwen/Qwen3-30B-A3B-FP8 -tp 4")
    assert repairs(off)["engine-fp8-blocks"] == "engine ep 1 → 4 — add --enable-expert-parallel"
    assert judged(tmp_path, "vllm serve Qwen/Qwen3-30B-A3B-FP8 -tp 4 --enable-expert-parallel").legal


@pytest.mark.parametrize(
    "image", ["vllm/vllm-openai:latest", "docker.io/vllm/vllm-openai@sha256:0a", "vllm/vllm-openai"]
)
def test_an_image_of_vllms_server_takes_its_options(image: str, tmp_path: Path) -> None:
    text = f"docker run --gpus all -e VLLM_LOGGING_LEVEL=INFO {image} --model Qwen/Qwen3-30B-A3B -tp 3"
    verdict = judged(tmp_path, text)
    assert verdict.launch.project == "vllm"
    assert verdict.launch.environment["engine"]["VLLM_LOGGING_LEVEL"] == "INFO"
    assert "engine-heads" in repairs(verdict)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("vllm serve Qwen/Qwen3-4B --config serve.yaml", True),
        ("python -m sglang.launch_server --model-path Qwen/Qwen3-4B --config serve.yaml", True),
        ("python -m verl.trainer.main_ppo --config-name=mine actor_rollout_ref.model.path=Qwen/Qwen3-4B", True),
        ("python -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml data.train_batch_size=64", False),
        ("vllm serve Qwen/Qwen3-4B", False),
    ],
)
def test_settings_of_a_file_are_not_known_and_that_is_told(text: str, told: bool, tmp_path: Path) -> None:
    verdict = judged(tmp_path, text)
    assert ("settings-file" in repairs(verdict)) == told


def test_a_server_alone_has_no_refit(tmp_path: Path) -> None:
    verdict = judged(tmp_path, "vllm serve /data/DeepSeek-V4-Flash-bf16 -tp 2 --enable-expert-parallel")
    assert verdict.plan is not None
    assert [phase.phase for phase in verdict.plan.phases] == ["generate"]
    assert not verdict.legal
    assert not any(finding.message.startswith("refit") for finding in verdict.findings)
