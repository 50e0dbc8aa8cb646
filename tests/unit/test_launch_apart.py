"""Trainer and engines on devices of their own, nodes of any size: launches modelled on verl's asynchronous ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config.errors import ConfigError
from lockstep.driver.launch_commands import LaunchVerdict, plan_launch

COMMON = (
    "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B trainer.nnodes=1 trainer.n_gpus_per_node=4 "
    "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=2 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=8 "
)
FULLY = f"python3 -m verl.experimental.fully_async_policy.fully_async_main data.train_batch_size=0 {COMMON}"
ONE_STEP = f"python3 -m verl.experimental.one_step_off_policy.main_ppo data.train_batch_size=64 {COMMON}"
PLAIN = f"python3 -m verl.trainer.main_ppo data.train_batch_size=64 {COMMON}"


def judged(tmp_path: Path, text: str, hardware: str | None = None) -> LaunchVerdict:
    script = tmp_path / "run.sh"
    script.write_text(text)
    (verdict,) = plan_launch(script, hardware=hardware).verdicts
    return verdict


@pytest.mark.parametrize(
    ("command", "total", "rollout"),
    [
        (f"{FULLY} rollout.nnodes=1 rollout.n_gpus_per_node=4", 8, 4),
        (f"{FULLY} rollout.nnodes=2", 20, 16),
        (f"{FULLY} rollout.nnodes=0", 4, 0),
        (f"{ONE_STEP} rollout.nnodes=1 rollout.n_gpus_per_node=2", 6, 2),
        (
            f"{PLAIN} trainer.v1.trainer_mode=separate_async actor_rollout_ref.rollout.nnodes=1 "
            "actor_rollout_ref.rollout.n_gpus_per_node=2",
            6,
            2,
        ),
        (f"{PLAIN} trainer.v1.trainer_mode=colocate_async", 4, 0),
        (PLAIN, 4, 0),
    ],
)
def test_engines_of_an_asynchronous_verl_have_devices_of_their_own(
    command: str, total: int, rollout: int, tmp_path: Path
) -> None:
    """The trainer's devices were taken for all, so that both halves' memory was summed on them."""
    job = judged(tmp_path, f"{command}\n").launch.job
    assert job is not None
    assert (job.num_gpus, job.rollout_gpus, job.colocated) == (total, rollout, rollout == 0)
    assert job.train_world == 4


def test_a_pool_that_engines_cannot_share_is_found_where_trainer_and_engines_are_apart(tmp_path: Path) -> None:
    verdict = judged(tmp_path, f"{FULLY} rollout.nnodes=1 rollout.n_gpus_per_node=3\n")
    (finding,) = [finding for finding in verdict.findings if finding.rule == "engine-pool"]
    assert finding.severity == "error"
    assert finding.message.startswith("3 devices do not divide into engines of 2")


def test_a_queue_is_counted_by_mini_batches(tmp_path: Path) -> None:
    """``data.train_batch_size`` is 0 there, by verl's own assertion."""
    verdict = judged(tmp_path, f"{FULLY} async_training.require_batches=2\n")
    assert verdict.launch.job is not None
    assert verdict.launch.job.batch is not None
    assert (verdict.launch.job.batch.num_prompts, verdict.launch.job.batch.optimizer_steps) == (64, 2)
    assert verdict.legal, verdict.findings


def test_no_option_of_the_trainer_is_offered_for_the_nodes_of_both(tmp_path: Path) -> None:
    """``nodes`` of such a job are trainer's and engines' together; a repair of them was spelled as the trainer's."""
    text = (
        "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 "
        "--rollout-num-gpus-per-engine 8 --hf-checkpoint Qwen/Qwen3-4B --rollout-batch-size 8 "
        "--n-samples-per-prompt 8 --pipeline-model-parallel-size 3\n"
    )
    verdict = judged(tmp_path, text)
    repairs = [finding.repair for finding in verdict.findings if finding.severity == "error"]
    assert repairs
    assert not any("--actor-num-nodes" in repair for repair in repairs), repairs


@pytest.mark.parametrize("program", ["verl.trainer.main_eval", "verl.trainer.main_generation_server"])
def test_what_only_evaluates_is_no_trainer(program: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m {program} trainer.nnodes=1\n")
    with pytest.raises(ConfigError, match="no launch command"):
        plan_launch(script)


@pytest.mark.parametrize(("hardware", "refused"), [(None, False), ("h200", True), ("mi355x", True), ("gb300", True)])
def test_a_node_of_devices_that_nobody_named_has_any_number_of_them(
    hardware: str | None, refused: bool, tmp_path: Path
) -> None:
    """Nodes of 16 exist; eight were assumed, and the launch refused for it."""
    verdict = judged(tmp_path, PLAIN.replace("n_gpus_per_node=4", "n_gpus_per_node=16") + "\n", hardware)
    assert ("node-devices" in {finding.rule for finding in verdict.findings}) == refused


@pytest.mark.parametrize(
    ("key", "replayed"),
    [
        ("actor_rollout_ref.actor.megatron.router_replay.mode=R3", True),
        ("actor_rollout_ref.actor.megatron.router_replay.mode=disabled", False),
        ("actor_rollout_ref.actor.router_replay.mode=R2", True),
    ],
)
def test_routing_replay_of_verl_is_read_where_it_is_set(key: str, replayed: bool, tmp_path: Path) -> None:
    verdict = judged(tmp_path, f"{PLAIN} model_engine=megatron {key}\n")
    assert verdict.launch.job is not None
    assert verdict.launch.job.routing_replay is replayed
    assert "flag-unknown" not in {finding.rule for finding in verdict.findings}


# --- the scheduler ----------------------------------------------------------------------------------------------------

SIZES = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --vocab-size 32000 --bf16 "
    "--micro-batch-size 1 --global-batch-size 64 --seq-length 4096\n"
)


@pytest.mark.parametrize(
    ("asked", "torchrun", "devices", "rules"),
    [
        ("#SBATCH --nodes=4\n#SBATCH --gres=gpu:8", "--nnodes 4 --nproc-per-node 8", (4, 8), set()),
        ("#SBATCH --nodes=4 --gpus-per-node=8", "--nnodes $SLURM_NNODES --nproc-per-node 8", (4, 8), set()),
        ("#SBATCH -N4  # nodes\n#SBATCH --gres=gpu:h100:8,nvme:1", "--nnodes $SLURM_JOB_NUM_NODES", (4, 8), set()),
        ("#SBATCH -N 2 --ntasks-per-node=1 --gpus-per-node=h100:4", "--nnodes 2", (2, 4), set()),
        ("#SBATCH --nodes 4", "--nnodes 8 --nproc-per-node 8", (8, 8), {"schedule-nodes"}),
        ("#SBATCH --nodes=4", "--nnodes 2 --nproc-per-node 8", (2, 8), {"schedule-nodes"}),
        ("#SBATCH --nodes=1 --gres=gpu:4", "--nnodes 1 --nproc-per-node 8", (1, 8), {"schedule-devices"}),
        ("#SBATCH --nodes=1 --gres=gpu:8", "--nnodes 1 --nproc-per-node 4", (1, 4), set()),
        ("# SBATCH --nodes=4", "--nnodes 2 --nproc-per-node 8", (2, 8), set()),
        ("#SBATCH --job-name --nodes=4 --gres", "--nnodes 4 --nproc-per-node 8", (4, 8), set()),
        ("#SBATCH --nodes=4-8", "--nnodes $SLURM_NNODES --nproc-per-node 8", (1, 8), set()),
        ("#SBATCH --nodes=4", "--nnodes $COUNT --nproc-per-node 8", (4, 8), set()),
    ],
)
def test_what_torchrun_counts_is_held_against_what_the_scheduler_is_asked_for(
    asked: str, torchrun: str, devices: tuple[int, int], rules: set[str], tmp_path: Path
) -> None:
    """A contradiction passed in silence, and of several options on a line the first alone was read."""
    text = f"#!/bin/bash\n{asked}\nsrun --export=ALL torchrun {torchrun} pretrain_gpt.py {SIZES}"
    verdict = judged(tmp_path, text)
    assert verdict.launch.job is not None
    assert (verdict.launch.job.nodes, verdict.launch.job.gpus_per_node) == devices
    found = {finding.rule: finding.severity for finding in verdict.findings if finding.rule.startswith("schedule-")}
    assert found == dict.fromkeys(rules, "warning")


def test_a_step_on_fewer_nodes_than_the_job_is_held_against_its_own_number(tmp_path: Path) -> None:
    text = f"#SBATCH --nodes=4\nsrun --nodes=2 torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py {SIZES}"
    assert "schedule-nodes" not in {finding.rule for finding in judged(tmp_path, text).findings}


# --- engines that are elsewhere, or alone -----------------------------------------------------------------------------

MILES = (
    "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --hf-checkpoint Qwen/Qwen3-4B "
    "--rollout-num-gpus-per-engine 2 --rollout-batch-size 8 --n-samples-per-prompt 8 "
)


@pytest.mark.parametrize(
    "external", ["--rollout-external --rollout-external-engine-addrs a:1 b:2", "--rollout-external-engine-addrs a:1"]
)
def test_engines_that_run_elsewhere_take_no_devices_of_the_job(external: str, tmp_path: Path) -> None:
    """They were refused for having none."""
    verdict = judged(tmp_path, f"{MILES}{external}\n", "h200")
    assert verdict.legal, verdict.findings
    assert verdict.launch.job is not None
    assert (verdict.launch.job.train_world, verdict.launch.job.engine) == (8, None)
    assert any("elsewhere" in text for text in verdict.launch.assumptions)


@pytest.mark.parametrize(
    ("options", "devices"),
    [("--rollout-num-gpus 4", (1, 4)), ("--rollout-num-gpus 16", (2, 8)), ("--colocate", (1, 8))],
)
def test_a_rollout_alone_has_its_own_devices_only(options: str, devices: tuple[int, int], tmp_path: Path) -> None:
    """The trainer's were added, and the sum refused as more than a node has."""
    verdict = judged(tmp_path, f"{MILES}--debug-rollout-only {options}\n", "h200")
    assert verdict.legal, verdict.findings
    assert verdict.launch.job is not None
    assert verdict.launch.job.train is None
    assert (verdict.launch.job.nodes, verdict.launch.job.gpus_per_node) == devices
