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


def test_what_starts_a_shell_counts_for_the_commands_within(tmp_path: Path) -> None:
    """The nodes of ``srun`` around ``bash -c`` were lost, and its variables with them."""
    sizes = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 8 --group-query-attention"
    job = f"python pretrain_gpt.py {sizes} --tensor-model-parallel-size $TP --micro-batch-size 1 --global-batch-size 16"
    found = judged(
        tmp_path, f"CUDA_DEVICE_MAX_CONNECTIONS=1 TP=8 srun -N 4 --ntasks-per-node=8 bash -c '{job} --seq-length 4096'"
    )
    assert found.launch.job is not None
    assert found.launch.job.train is not None
    assert (found.launch.job.nodes, found.launch.job.gpus_per_node, found.launch.job.train.tp) == (4, 8, 8)
    assert "device-connections" not in repairs(found)


@pytest.mark.parametrize(
    "text",
    [
        "docker run -e TP=4 image bash -c 'vllm serve Qwen/Qwen3-4B -tp $TP'",
        "export TP=3\nTP=4 bash -c 'vllm serve Qwen/Qwen3-4B -tp $TP'",
        "env TP=4 bash -c 'vllm serve Qwen/Qwen3-4B -tp $TP'",
        "TP=3 bash -c 'true vllm serve'\nTP=4\nvllm serve Qwen/Qwen3-4B -tp $TP",
    ],
)
def test_variables_before_a_shell_are_its_own(text: str, tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(text + "\n")
    job = plan_launch(script, hardware="h200").verdicts[-1].launch.job
    assert job is not None
    assert job.engine is not None
    assert job.engine.tp == 4


@pytest.mark.parametrize(
    ("backend", "hardware", "refused"),
    [
        ("fa3", "h200", False),
        ("fa3", "b200", True),
        ("fa3", "gb300", True),
        ("fa3", "mi300x", True),
        ("trtllm_mha", "gb300", False),
        ("trtllm_mha", "h100", False),
        ("trtllm_mha", "mi300x", True),
        ("trtllm_mla", "h200", True),
        ("cutedsl_mla", "h200", True),
        ("cutedsl_mla", "gb300", False),
        ("trtllm_mla", "mi355x", True),
        ("triton", "mi355x", False),
        ("flashinfer", "b200", False),
        ("fa3", None, False),
    ],
)
@pytest.mark.parametrize("server", [True, False])
def test_an_attention_back_end_is_for_certain_devices(
    server: bool, backend: str, hardware: str | None, refused: bool, tmp_path: Path
) -> None:
    """The flag that a move from Hopper to Blackwell or to AMD leaves behind."""
    serve = "python -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B --tp 4 --attention-backend "
    script = tmp_path / "run.sh"
    script.write_text(f"{serve if server else MILES + '--sglang-attention-backend '}{backend}\n")
    (verdict,) = plan_launch(script, hardware=hardware).verdicts
    found = repairs(verdict)
    assert ("sglang-attention-backend" in found) == refused
    if refused:
        flag = "--attention-backend" if server else "--sglang-attention-backend"
        assert f"drop {flag} on line 1" in found["sglang-attention-backend"]


@pytest.mark.parametrize(
    ("backends", "hardware", "dropped"),
    [
        ("--prefill-attention-backend fa3 --decode-attention-backend triton", "h200", ()),
        ("--prefill-attention-backend fa3 --decode-attention-backend triton", "b200", ("prefill",)),
        ("--prefill-attention-backend fa3 --decode-attention-backend trtllm_mla", "mi355x", ("prefill", "decode")),
        ("--attention-backend triton --decode-attention-backend trtllm_mla", "h200", ("decode",)),
        ("--attention-backend fa3 --decode-attention-backend triton", "gb300", ("",)),
        ("--attention-backend fa3 --prefill-attention-backend aiter --decode-attention-backend aiter", "mi355x", ()),
    ],
)
@pytest.mark.parametrize("server", [True, False])
def test_prefill_and_decode_may_have_attention_back_ends_of_their_own(
    server: bool, backends: str, hardware: str, dropped: tuple[str, ...], tmp_path: Path
) -> None:
    """They were not read: the general one was judged although neither phase used it, and theirs were not."""
    serve = "python -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B --tp 4 "
    script = tmp_path / "run.sh"
    script.write_text((serve + backends if server else MILES + backends.replace("--", "--sglang-")) + "\n")
    (verdict,) = plan_launch(script, hardware=hardware).verdicts
    found = repairs(verdict).get("sglang-attention-backend", "")
    prefix = "--" if server else "--sglang-"
    flags = [f"{prefix}{phase}{'-' if phase else ''}attention-backend" for phase in ("", "prefill", "decode")]
    expected = {f"{prefix}{phase}{'-' if phase else ''}attention-backend" for phase in dropped}
    assert {flag for flag in flags if f"drop {flag} on line 1" in found} == expected
