"""What a launch script leaves open or nobody counts makes no refusal; what no value of it could mend still does."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.driver.launch_commands import LaunchVerdict, plan_launch

VERL = (
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B trainer.n_gpus_per_node=8 "
    "data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.name=vllm "
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 "
    "actor_rollout_ref.rollout.tensor_model_parallel_size=4 "
)
SIZES = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 8 --ffn-hidden-size 14336 --swiglu "
    "--vocab-size 32000 --disable-bias-linear --bf16 --moe-router-topk 2 "
)


def judged(tmp_path: Path, text: str, hardware: str = "h200", nodes: int | None = None) -> LaunchVerdict:
    script = tmp_path / "run.sh"
    script.write_text(text)
    (verdict,) = plan_launch(script, hardware=hardware, nodes=nodes).verdicts
    return verdict


def severities(verdict: LaunchVerdict) -> dict[str, str]:
    return {finding.rule: finding.severity for finding in verdict.findings}


def message(verdict: LaunchVerdict, rule: str) -> str:
    return next(finding.message for finding in verdict.findings if finding.rule == rule)


# --- verl's choice of a trainer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "backend"),
    [
        ("model_engine=megatron", "megatron"),
        ("--config-name=ppo_megatron_trainer", "megatron"),
        ("model_engine=dp --config-name=ppo_megatron_trainer", "fsdp"),
        ("model_engine=megatron actor_rollout_ref.actor.strategy=fsdp2", "fsdp"),
        ("", "fsdp"),
    ],
)
def test_verl_chooses_its_trainer_in_three_ways(chosen: str, backend: str, tmp_path: Path) -> None:
    """Most of verl's examples say ``model_engine=megatron``; they were judged as FSDP and their layout as inert."""
    verdict = judged(tmp_path, VERL + chosen + "\n")
    assert verdict.launch.job is not None
    assert verdict.launch.job.train is not None
    assert verdict.launch.job.train.backend == backend
    assert verdict.launch.job.train.tp == (4 if backend == "megatron" else 1)
    assert ("flag-inert" in severities(verdict)) == (backend == "fsdp")
    assert "flag-unknown" not in severities(verdict)


@pytest.mark.parametrize("chosen", ["model_engine=veomni", "actor_rollout_ref.actor.strategy=fsdp_turbo"])
def test_of_a_trainer_that_is_not_known_the_engine_alone_is_judged(chosen: str, tmp_path: Path) -> None:
    verdict = judged(tmp_path, f"{VERL}{chosen} actor_rollout_ref.rollout.expert_parallel_size=2\n")
    assert verdict.launch.job is not None
    assert verdict.launch.job.train is None
    assert severities(verdict)["trainer-unknown"] == "warning"
    assert chosen.partition("=")[2] in message(verdict, "trainer-unknown")
    assert severities(verdict)["vllm-expert-size"] == "error"
    assert "flag-inert" not in severities(verdict)


def ulysses(size: int, more: str = "") -> str:
    return VERL.replace("train_batch_size=64", "train_batch_size=4").replace(
        "mini_batch_size=64", "mini_batch_size=4"
    ) + (
        f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={size} "
        f"actor_rollout_ref.model.use_remove_padding=True {more}\n"
    )


def test_ranks_that_share_a_sequence_are_no_data_parallel_ranks(tmp_path: Path) -> None:
    """The option was read and had no effect: four samples a step on eight ranks were refused."""
    alone, shared = judged(tmp_path, ulysses(1)), judged(tmp_path, ulysses(4))
    assert severities(alone)["batch-ranks"] == "error"
    assert not {"batch-ranks", "batch-uneven"} & severities(shared).keys()
    assert message(judged(tmp_path, ulysses(3)), "fsdp-ulysses").startswith("ulysses 3 does not divide 8 ranks")
    padded = judged(tmp_path, ulysses(4, "actor_rollout_ref.model.use_remove_padding=False"))
    assert severities(padded)["fsdp-ulysses-packing"] == "error"


# --- a model that is not known ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve org/Unknown-235B-A22B -tp 6 --enable-expert-parallel\n",
        "python -m sglang.launch_server --model-path org/Unknown-235B-A22B --tp 6 --ep-size 6\n",
        VERL.replace("Qwen/Qwen3-30B-A3B", "org/Unknown").replace("rollout.tensor_model_parallel_size=4", "n=8")
        + "actor_rollout_ref.rollout.expert_parallel_size=6 actor_rollout_ref.rollout.tensor_model_parallel_size=6\n",
    ],
)
def test_experts_that_an_engine_spreads_are_there_and_their_number_is_not_made_up(text: str, tmp_path: Path) -> None:
    verdict = judged(tmp_path, text)
    assert not verdict.launch.model_known
    assert not {"engine-no-experts", "sglang-experts", "experts-ep"} & severities(verdict).keys()


# --- what a running shell alone knows ---------------------------------------------------------------------------------


def test_a_grid_that_another_number_of_nodes_would_fit_is_not_refused_for_an_assumed_one(tmp_path: Path) -> None:
    text = (
        f"torchrun --nproc-per-node 8 --nnodes $NNODES pretrain_gpt.py {SIZES} --num-experts 8 "
        "--expert-model-parallel-size 8 --pipeline-model-parallel-size 4 --expert-tensor-parallel-size 1 "
        "--use-distributed-optimizer --moe-token-dispatcher-type alltoall\n"
    )
    open_ended = judged(tmp_path, text)
    assert severities(open_ended)["expert-grid"] == "warning"
    assert message(open_ended, "expert-grid").endswith("; it rests on the number of nodes, which is not known")
    assert open_ended.legal
    assert severities(judged(tmp_path, text, nodes=1))["expert-grid"] == "error"
    assert "expert-grid" not in severities(judged(tmp_path, text, nodes=4))


def test_what_no_number_of_nodes_could_mend_is_refused_all_the_same(tmp_path: Path) -> None:
    text = (
        f"torchrun --nproc-per-node 8 --nnodes $NNODES pretrain_gpt.py {SIZES} --num-experts 8 "
        "--expert-model-parallel-size 16 --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall\n"
    )
    verdict = judged(tmp_path, text)
    assert severities(verdict)["experts-ep"] == "error"
    assert not verdict.legal


def test_an_engine_of_unknown_size_is_not_refused_for_its_memory(tmp_path: Path) -> None:
    text = "vllm serve /data/DeepSeek-V4-Flash-bf16 --enable-expert-parallel --tensor-parallel-size {}\n"
    assert severities(judged(tmp_path, text.format(1)))["engine-memory"] == "error"
    open_ended = judged(tmp_path, text.format("$(nvidia-smi -L | wc -l)"))
    assert severities(open_ended)["engine-memory"] == "warning"
    assert message(open_ended, "engine-memory").endswith("; it rests on tp, which is not known")


@pytest.mark.parametrize(
    ("environment", "severity"),
    [('{"env_vars": {"NCCL_DEBUG": "INFO"}}', "error"), ("$(python3 - <<PY\nprint(1)\nPY\n)", "warning")],
)
def test_a_variable_is_not_missed_in_an_environment_that_a_program_prints(
    environment: str, severity: str, tmp_path: Path
) -> None:
    text = (f"RUNTIME_ENV_JSON='{environment}'\n" if severity == "error" else f'RUNTIME_ENV_JSON="{environment}"\n') + (
        'ray job submit --runtime-env-json="${RUNTIME_ENV_JSON}" -- python3 train.py --actor-num-nodes 1 '
        "--actor-num-gpus-per-node 8 --colocate --hf-checkpoint Qwen/Qwen3-4B --tensor-model-parallel-size 2 "
        "--rollout-num-gpus-per-engine 2 --rollout-batch-size 32 --n-samples-per-prompt 8\n"
    )
    verdict = judged(tmp_path, text)
    assert severities(verdict)["device-connections"] == severity


# --- what is not counted ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lora", "legal"), [("", False), ("--lora-rank 0", False), ("--lora-rank 32", True)])
def test_memory_that_an_uncounted_option_saves_is_no_refusal(lora: str, legal: bool, tmp_path: Path) -> None:
    text = (
        "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 1 --colocate "
        "--hf-checkpoint Qwen/Qwen3-30B-A3B "
        f"--rollout-num-gpus-per-engine 1 --rollout-batch-size 8 --n-samples-per-prompt 8 --bf16 {lora}\n"
    )
    verdict = judged(tmp_path, text)
    assert ("memory-fits" in severities(verdict)) is True
    assert verdict.legal == legal, verdict.findings
    assert list(verdict.launch.unplanned) == (["--lora-rank (LoRA trains adapters alone)"] if legal else [])


def test_a_repair_of_pre_training_names_no_flag_of_rollouts(tmp_path: Path) -> None:
    text = (
        f"torchrun --nproc-per-node 8 --nnodes 1 pretrain_gpt.py {SIZES} --num-experts 8 --use-distributed-optimizer "
        "--moe-token-dispatcher-type alltoall --micro-batch-size 4 --global-batch-size 48 --seq-length 1024\n"
    )
    verdict = judged(tmp_path, text)
    (repair,) = [finding.repair for finding in verdict.findings if finding.rule == "batch-split"]
    assert "--global-batch-size" in repair
    assert "grpo" not in repair


def test_dp_attention_divides_the_prefill_chunk(tmp_path: Path) -> None:
    """SGLang gives each data-parallel rank its share of the chunk; the whole one was counted on each."""

    def working(arguments: str) -> int:
        text = "python -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B --chunked-prefill-size 65536 --tp 8 "
        plan = judged(tmp_path, f"{text}{arguments} --max-running-requests 8\n").plan
        assert plan is not None
        return next(i.num_bytes for p in plan.phases for i in p.items if i.name == "prefill and logits")

    assert working("--dp-size 8 --enable-dp-attention") == pytest.approx(working(""), rel=0.02)
    assert working("--dp-size 4 --enable-dp-attention") == pytest.approx(working(""), rel=0.02)


def test_another_name_of_an_option_leaves_it_as_open(tmp_path: Path) -> None:
    """``--tp $TP`` is ``--tp-size``; it was judged as tp 1, and dp 8 refused."""
    condition = 'if [ "$NNODES" -gt 1 ]; then TP=16; else TP=8; fi\n'
    serve = "python -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B --dp 8 --enable-dp-attention --tp "
    assert severities(judged(tmp_path, f"{condition}{serve}$TP\n"))["sglang-dp-attention"] == "warning"
    assert severities(judged(tmp_path, f"{serve}4\n"))["sglang-dp-attention"] == "error"


def test_the_last_one_of_an_option_settles_it_by_whatever_name(tmp_path: Path) -> None:
    serve = "python -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B --tp-size $(count) --tp 8\n"
    found = judged(tmp_path, serve)
    assert "not-known" not in severities(found)
    assert found.launch.job is not None
    assert found.launch.job.engine is not None
    assert found.launch.job.engine.tp == 8
    assert "engine.tp" not in found.launch.unknown


@pytest.mark.parametrize(("hardware", "severity"), [(None, "warning"), ("h200", "error"), ("gb300", None)])
def test_blackwell_does_without_one_connection_a_device(
    hardware: str | None, severity: str | None, tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"torchrun --nproc-per-node 4 pretrain_gpt.py {SIZES} --num-experts 8 --tensor-model-parallel-size 4 "
        "--sequence-parallel --micro-batch-size 1 --global-batch-size 4 --seq-length 4096\n"
    )
    (verdict,) = plan_launch(script, hardware=hardware).verdicts
    assert severities(verdict).get("device-connections") == severity


@pytest.mark.parametrize(
    ("start", "severity"),
    [
        ("torchrun --nproc-per-node 4", "error"),
        ("python -m torch.distributed.run --nproc_per_node=4", "error"),
        ("torchrun --nproc-per-node 4 --nnodes $NODES", "warning"),
        ("torchrun $DISTRIBUTED", "warning"),
        ("srun --ntasks-per-node=4 python", "warning"),
    ],
)
def test_torchrun_that_states_no_nodes_is_one_node(start: str, severity: str, tmp_path: Path) -> None:
    job = f"pretrain_gpt.py {SIZES} --num-experts 8 --pipeline-model-parallel-size 2 --expert-model-parallel-size 4"
    text = (
        f"{start} {job} --expert-tensor-parallel-size 2 --micro-batch-size 1 --global-batch-size 16 --seq-length 64\n"
    )
    assert severities(judged(tmp_path, text))["expert-grid"] == severity


@pytest.mark.parametrize("flag", ["--num-layers", "--hidden-size", "--ffn-hidden-size", "--vocab-size"])
@pytest.mark.parametrize("value", ["-1", "99999999999"])
def test_a_size_that_no_model_has_is_told_with_its_bounds(flag: str, value: str, tmp_path: Path) -> None:
    """A negative one was a traceback."""
    text = f"torchrun --nproc-per-node 8 pretrain_gpt.py {SIZES} --micro-batch-size 1 {flag} {value}\n"
    verdict = judged(tmp_path, text)
    assert not verdict.launch.model_known
    assert f"{flag} {value} is beyond any model" in message(verdict, "model-unknown")


@pytest.mark.parametrize(
    ("option", "eased"),
    [
        ("", False),
        ("actor_rollout_ref.model.use_fused_kernels=True", True),
        ("actor_rollout_ref.model.use_fused_kernels=False", False),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype=bf16", True),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype=fp32", False),
        ("actor_rollout_ref.actor.megatron.use_megatron_fsdp=True model_engine=megatron", True),
    ],
)
def test_what_verl_saves_and_nobody_counts_is_no_refusal(option: str, eased: bool, tmp_path: Path) -> None:
    verdict = judged(tmp_path, f"{VERL.replace('n_gpus_per_node=8', 'n_gpus_per_node=4')}{option}\n")
    assert severities(verdict)["memory-fits"] == ("warning" if eased else "error")


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("", True),
        ("algorithm.adv_estimator=gae", True),
        ("algorithm.adv_estimator=grpo", False),
        ("algorithm.adv_estimator=grpo critic.enable=True", True),
        ("critic.enable=False", False),
    ],
)
def test_a_critic_that_is_not_counted_is_told(option: str, told: bool, tmp_path: Path) -> None:
    """It doubles what a trainer holds, and a plan without it passed in silence."""
    verdict = judged(tmp_path, f"{VERL}{option}\n")
    assert any("critic" in text for text in verdict.launch.assumptions) is told
