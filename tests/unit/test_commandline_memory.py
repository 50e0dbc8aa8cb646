"""Memory of public launch scripts that are said to run: the plan agrees, or says by which upper bound it does not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lockstep.driver.launch_commands import LaunchVerdict, plan_launch
from lockstep.topology.records import Finding

LLAMA = r"""
# The essentials of NVIDIA/Megatron-LM examples/llama/train_llama3_8b_h100_fp8.sh at d98e8a64.
CP_SIZE=1
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention \
    --num-query-groups 8 --kv-channels 128 --seq-length 8192 --swiglu --untie-embeddings-and-output-weights \
    --disable-bias-linear --micro-batch-size 1 --global-batch-size 128 --bf16 --grad-reduce-in-bf16 \
    --cross-entropy-loss-fusion --calculate-per-token-loss --use-distributed-optimizer --overlap-grad-reduce \
    --overlap-param-gather --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-param-gather \
    --tensor-model-parallel-size 1 --context-parallel-size $CP_SIZE --vocab-size 128256
"""

QWEN = r"""
# The essentials of verl-project/verl examples/grpo_trainer/run_qwen3moe-30b_megatron_96gb.sh at b178a3cd, "tested in
# NNODES=1~4 * 96G H20 GPU". Others ran out of memory with it: verl issue 3364, NVIDIA-NeMo/RL issue 1130.
python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer \
    actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B-Base \
    data.max_prompt_length=2048 data.max_response_length=8192 data.train_batch_size=512 \
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10240 \
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=1. \
    +actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer=True \
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True \
    actor_rollout_ref.actor.megatron.param_offload=True actor_rollout_ref.actor.megatron.grad_offload=True \
    actor_rollout_ref.actor.megatron.optimizer_offload=True \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7 actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.enforce_eager=True trainer.n_gpus_per_node=8 trainer.nnodes=1
"""


def judged(tmp_path: Path, script: str, hardware: str, *variables: str) -> LaunchVerdict:
    path = tmp_path / "run.sh"
    path.write_text(script)
    (verdict,) = plan_launch(path, hardware=hardware, variables=variables).verdicts
    return verdict


def fit(verdict: LaunchVerdict) -> list[Finding]:
    return [finding for finding in verdict.findings if finding.rule == "memory-fits"]


def test_llama_3_in_fp8_fits_eight_h100(tmp_path: Path) -> None:
    verdict = judged(tmp_path, LLAMA, "h100")
    assert verdict.legal
    assert verdict.plan is not None
    items = {item.name: item.num_bytes / 1e9 for item in verdict.plan.phase("train").items}
    # By hand: 8.03e9 parameters; fp8 parameters keep rows and columns; gradients in bf16; 12 bytes over 8 ranks.
    assert items["weights"] == pytest.approx(16.06, abs=0.01)
    assert items["gradients"] == pytest.approx(16.06, abs=0.01)
    assert items["optimizer states"] == pytest.approx(12.05, abs=0.01)
    # A token and layer: 6·4096 + 2·(4096 + 2048) + 3·4096 + 5·14336, and 6 bytes for each logit.
    assert items["activations"] == pytest.approx(8192 * 32 * 120_832 / 1e9, rel=1e-6)
    assert items["logits and loss"] == pytest.approx(8192 * 128_256 * 6 / 1e9, rel=1e-6)
    assert verdict.plan.phase("train").total_bytes < 85.5e9
    assert [finding.severity for finding in fit(verdict)] == ["warning"]


def test_llama_3_with_the_context_parallel_size_of_its_readme_fits_with_room(tmp_path: Path) -> None:
    """examples/llama/README.md measures the model on eight H100 with a context-parallel size of 2."""
    assert not fit(judged(tmp_path, LLAMA, "h100", "CP_SIZE=2"))


def test_llama_3_without_fp8_does_not_fit_and_recomputing_is_the_repair(tmp_path: Path) -> None:
    script = LLAMA.replace("--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-param-gather", "--seed 1")
    (finding,) = fit(judged(tmp_path, script.replace("--seq-length 8192", "--seq-length 16384"), "h100"))
    assert finding.severity == "error"
    assert "add --recompute-granularity" in finding.repair or "--recompute-granularity full" in finding.repair
    repaired = script.replace(
        "--seed 1", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )
    assert judged(tmp_path, repaired.replace("--seq-length 8192", "--seq-length 16384"), "h100").legal


def test_qwen3_30b_on_eight_h20_may_not_fit_and_the_items_are_named(tmp_path: Path) -> None:
    verdict = judged(tmp_path, QWEN, "h20")
    assert verdict.legal
    (finding,) = fit(verdict)
    assert finding.severity == "warning"
    assert "it may not fit: the number is an upper bound by trainer activations" in finding.message
    assert "trainer communicators" in finding.message
    assert "recompute none → full" in finding.repair
    assert "override_transformer_config.recompute_granularity=full" in finding.repair


def test_qwen3_30b_on_eight_h100_does_not_fit_whatever_the_bounds(tmp_path: Path) -> None:
    (finding,) = fit(judged(tmp_path, QWEN, "h100"))
    assert finding.severity == "error"
    assert "it may not fit" not in finding.message


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("Qwen/Qwen3-4B", 8.04),
        # Four bits and a byte for 32: 3.63e9 parameters of linears; embedding and norms stay in bf16.
        ("Qwen/Qwen3-4B-AWQ", 3.633e9 * (0.5 + 1 / 32) / 1e9 + 2 * 0.389),
        ("Qwen/Qwen3-4B-GPTQ-Int4", 3.633e9 * (0.5 + 1 / 32) / 1e9 + 2 * 0.389),
    ],
)
def test_four_bit_checkpoints_of_dense_models_count_their_linears(tmp_path: Path, name: str, gigabytes: float) -> None:
    verdict = judged(tmp_path, f"vllm serve {name} --gpu-memory-utilization 0.5\n", "h100")
    assert verdict.plan is not None
    weights = verdict.plan.phase("generate").item("weights", "engine")
    assert weights is not None
    assert weights.num_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(
    ("option", "weights", "gradients", "states"),
    [
        ("", 16.06, 16.06, 12.05),
        ("--use-megatron-fsdp", 16.06 / 8, 16.06 / 8, 12.05),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", 16.06, 16.06 / 8, 12.05),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy no_shard", 16.06, 16.06, 12.05),
        ("--use-torch-fsdp2", 16.06 / 8, 16.06 / 8, 12.05),
    ],
)
def test_what_fsdp_spreads_over_data_parallel_ranks(
    tmp_path: Path, option: str, weights: float, gradients: float, states: float
) -> None:
    """NVIDIA/Megatron-LM examples/megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh on eight H100; the strategies are
    those of megatron/training/arguments.py: --data-parallel-sharding-strategy."""
    verdict = judged(tmp_path, LLAMA.replace("--bf16", f"--bf16 {option}"), "h100")
    assert verdict.plan is not None
    items = {item.name: item.num_bytes / 1e9 for item in verdict.plan.phase("train").items}
    assert items["weights"] == pytest.approx(weights, rel=1e-3)
    assert items["gradients"] == pytest.approx(gradients, rel=1e-3)
    assert items["optimizer states"] == pytest.approx(states, rel=1e-3)
    assert ("gathered layers" in items) == bool(option)
    assert not [finding for finding in fit(verdict) if finding.severity == "error"]


@pytest.mark.parametrize(
    ("param", "optimizer", "held"),
    [
        (True, True, {"score": "w", "train": "wgo", "refit": "w", "save": "wg", "generate": ""}),
        (True, False, {"score": "wo", "train": "wgo", "refit": "wo", "save": "wgo", "generate": "o"}),
        (False, True, {"score": "wg", "train": "wgo", "refit": "wg", "save": "wg", "generate": "wg"}),
        (False, False, dict.fromkeys(("score", "train", "refit", "save", "generate"), "wgo")),
    ],
)
def test_what_verl_has_on_the_device_in_each_phase(
    tmp_path: Path, param: bool, optimizer: bool, held: dict[str, str]
) -> None:
    """param_offload takes weights and gradients, optimizer_offload the states; a forward alone loads no gradients (verl
    verl/workers/engine/megatron/transformer_impl.py: EngineEvalModeCtx, to)."""
    script = QWEN.replace("optimizer_cpu_offload=True", "optimizer_cpu_offload=False")
    script = script.replace("param_offload=True", f"param_offload={param}")
    verdict = judged(tmp_path, script.replace("optimizer_offload=True", f"optimizer_offload={optimizer}"), "h200")
    assert verdict.plan is not None
    letters = {"weights": "w", "gradients": "g", "optimizer states": "o"}
    for plan in verdict.plan.phases:
        there = "".join(letters[i.name] for i in plan.items if i.owner == "trainer" and i.name in letters)
        assert there == held[plan.phase], plan.phase
    states = next(i.num_bytes for i in verdict.plan.phase("train").items if i.name == "optimizer states")
    left = [item for item in verdict.plan.host if item.name in ("trainer's state", "offloaded states")]
    assert bool(left) == (param or optimizer)
    if optimizer and not param:
        assert left[0].num_bytes == 8 * states


@pytest.mark.parametrize(
    ("options", "trained", "scored"),
    [
        ("", 10240, 10240),
        ("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=40960", 10240, 40960),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480", 20480, 20480),
        ("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=False", 10240, 10240),
        (
            "actor_rollout_ref.actor.use_dynamic_bsz=False actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 "
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
            2 * 10240,
            4 * 10240,
        ),
    ],
)
def test_log_probs_of_verl_have_their_own_budget(tmp_path: Path, options: str, trained: int, scored: int) -> None:
    verdict = judged(tmp_path, QWEN.rstrip("\n") + f" {options}\n", "h200")
    assert verdict.plan is not None
    for phase, tokens in (("train", trained), ("score", scored)):
        item = next(i for i in verdict.plan.phase(phase).items if i.name == "logits and loss")  # pyright: ignore[reportArgumentType]
        assert item.num_bytes == 151_936 * 6 * tokens


def test_a_dynamic_batch_of_verl_has_its_default_budget(tmp_path: Path) -> None:
    verdict = judged(tmp_path, QWEN.replace("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10240", ""), "h200")
    assert verdict.launch.job is not None
    assert verdict.launch.job.batch is not None
    assert verdict.launch.job.batch.max_tokens_per_gpu == 16384


def test_more_stages_than_layers_are_no_plan_and_take_no_time(tmp_path: Path) -> None:
    began = time.process_time()
    verdict = judged(tmp_path, LLAMA.replace("--bf16", "--bf16 --pipeline-model-parallel-size 65536"), "h100")
    assert time.process_time() - began < 2
    assert verdict.plan is not None
    assert not verdict.plan.phases
    assert any("train.pp = 65536" in finding.message for finding in verdict.plan.findings)
