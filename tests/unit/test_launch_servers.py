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


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("vllm serve Qwen/Qwen3-30B-A3B -tp 2 --data-parallel-size 4 --data-parallel-size-local 1", (4, 2)),
        ("vllm serve Qwen/Qwen3-30B-A3B -tp 2 --data-parallel-size 4", (1, 8)),
        ("vllm serve Qwen/Qwen3-30B-A3B -tp 4 --data-parallel-size 4", (2, 8)),
    ],
)
def test_local_ranks_say_over_how_many_nodes_a_server_lies(text: str, nodes: tuple[int, int], tmp_path: Path) -> None:
    job = judged(tmp_path, text).launch.job
    assert job is not None
    assert (job.nodes, job.gpus_per_node) == nodes


def test_changes_of_the_models_configuration_are_not_read_and_that_is_told(tmp_path: Path) -> None:
    verdict = judged(tmp_path, """vllm serve Qwen/Qwen3-4B --hf-overrides '{"num_hidden_layers": 4}'""")
    assert "model-overrides" in repairs(verdict)


MILES = (
    "python3 train.py --hf-checkpoint Qwen/Qwen3-30B-A3B --rollout-batch-size 8 --n-samples-per-prompt 8 "
    "--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 12 --rollout-num-gpus-per-engine 8 "
)


@pytest.mark.parametrize(
    ("more", "nodes"), [("", (2, 8)), ("--num-gpus-per-node 4", (4, 4)), ("--rollout-num-gpus 3", (1, 7))]
)
def test_trainer_and_engines_may_share_a_node(more: str, nodes: tuple[int, int], tmp_path: Path) -> None:
    """A trainer of four devices made nodes of four, and an engine of eight was said to cross them."""
    verdict = judged(tmp_path, MILES + more)
    assert verdict.launch.job is not None
    assert (verdict.launch.job.nodes, verdict.launch.job.gpus_per_node) == nodes
    assert ("engine-fast-links" in repairs(verdict)) == (nodes == (4, 4))


def test_a_run_of_rollouts_alone_has_no_trainer(tmp_path: Path) -> None:
    verdict = judged(tmp_path, MILES + "--debug-rollout-only")
    assert verdict.launch.job is not None
    assert verdict.launch.job.train is None
    assert verdict.plan is not None
    assert not any(item.owner == "trainer" for phase in verdict.plan.phases for item in phase.items)
