"""Launch scripts modelled on public ones: each legal one passes, each planted fault is found with its repair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.config.errors import ConfigError
from lockstep.driver.launch_commands import LaunchReport, LaunchVerdict, plan_launch

SCRIPTS = Path(__file__).parent / "launch_commands"

H200 = "h200"
Found = dict[str, list[tuple[str, str, str]]]


def judged(name: str, *variables: str, hardware: str | None = H200) -> LaunchReport:
    return plan_launch(SCRIPTS / f"{name}.sh", hardware=hardware, variables=variables)


def found(verdict: LaunchVerdict) -> Found:
    """Severity, message and repair by rule."""
    table: Found = {}
    for finding in verdict.findings:
        table.setdefault(finding.rule, []).append((finding.severity, finding.message, finding.repair))
    return table


def rules(verdict: LaunchVerdict, severity: str) -> set[str]:
    return {finding.rule for finding in verdict.findings if finding.severity == severity}


@pytest.mark.parametrize("name", sorted(path.stem for path in SCRIPTS.glob("*_legal.sh")))
def test_a_legal_launch_has_no_error_and_no_warning(name: str) -> None:
    report = judged(name)
    assert report.exit_code == 0
    (verdict,) = report.verdicts
    assert not rules(verdict, "error") | rules(verdict, "warning"), report.text()
    assert verdict.launch.model_known
    assert verdict.plan is not None
    assert verdict.plan.phases


def test_megatron_has_its_sizes_from_its_flags_and_devices_from_torchrun() -> None:
    (verdict,) = judged("megatron_legal").verdicts
    job = verdict.launch.job
    assert job is not None
    assert (job.nodes, job.gpus_per_node) == (4, 8)
    assert job.train is not None
    assert (job.train.tp, job.train.pp, job.train.ep, job.train.etp) == (2, 4, 8, 1)
    assert (job.model.num_layers, job.model.num_kv_heads, job.model.num_experts) == (32, 8, 8)
    assert job.memory.overlap_param_gather
    assert job.environment["trainer"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_faults_of_a_megatron_launch() -> None:
    report = judged("megatron_faults")
    assert report.exit_code == 1
    (verdict,) = report.verdicts
    assert rules(verdict, "error") == {
        *("expert-grid", "sequence-parallel-moe", "recompute-settings", "device-connections"),
    }
    table = found(verdict)
    assert table["expert-grid"] == [
        (
            "error",
            "etp 1 · ep 8 · pp 4 = 32 does not divide world 8",
            "ep 8 → 2 or 1 — --expert-model-parallel-size 2 on line 20",
        )
    ]
    assert table["sequence-parallel-moe"][0][2].endswith("add --sequence-parallel")
    assert table["recompute-settings"][0][2].endswith("--recompute-method uniform; --recompute-num-layers 1")
    assert {message.partition(" has no effect")[0] for _, message, _ in table["flag-inert"]} == {
        "line 16: --fp8-recipe blockwise",
        "line 17: --optimizer-offload-fraction 0.5",
    }
    ((_, twice, way_out),) = table["flag-twice"]
    assert "--global-batch-size 256 is overridden on line 19" in twice
    assert way_out == "keep one of them: drop line 15's"
    assert table["flag-unknown"] == [
        (
            "note",
            "line 20: --tensor_model_parallel_size is not among the options of megatron that are known here",
            "did you mean --tensor-model-parallel-size?",
        )
    ]


def test_miles_knows_its_model_by_name_and_says_what_it_does_not_know() -> None:
    (verdict,) = judged("miles_legal").verdicts
    launch = verdict.launch
    assert launch.job is not None
    assert launch.job.model.name == "qwen3-30b-a3b"
    assert launch.job.refit_bucket_bytes == 512 << 20
    assert launch.job.memory.optimizer_offload_fraction == 1.0
    assert launch.job.memory.offload_weights
    assert {finding.rule for finding in verdict.findings} == {"not-known"}
    messages = [finding.message for finding in verdict.findings]
    assert any("nothing in the script sets BASE_DIR" in message for message in messages)
    assert any("NCCL_NVLS_ENABLE=${HAS_NVLINK}" in message for message in messages)


def test_faults_of_a_miles_launch() -> None:
    """The expert grid of radixark/miles#2347: etp 1 · ep 4 · pp 2 on four GPUs."""
    (verdict,) = judged("miles_faults").verdicts
    assert rules(verdict, "error") == {"expert-grid", "pipeline-even", "batch-steps"}
    table = found(verdict)
    assert table["expert-grid"] == [
        (
            "error",
            "etp 1 · ep 4 · pp 2 = 8 does not divide world 4",
            "ep 4 → 2 or 1 — --expert-model-parallel-size 2 on line 28",
        )
    ]
    assert table["pipeline-even"][0][2].endswith("--decoder-last-pipeline-num-layers 23")
    assert table["batch-steps"][0][2].endswith("--global-batch-size 128 on line 39")
    assert table["flag-refused"] == [
        (
            "warning",
            "line 33: --moe-enable-deepep: DeepEP is a back end of the flex dispatcher only, unless options that are "
            "not known say otherwise",
            "add --moe-token-dispatcher-type flex",
        )
    ]
    assert [message.split()[2] for _, message, _ in table["flag-inert"]] == [
        *("--rollout-num-gpus", "--sglang-tp-size", "--micro-batch-size"),
    ]


def test_what_a_missing_file_may_hold_is_told_apart_from_what_is_refused() -> None:
    (verdict,) = judged("miles_faults", "MODEL_ARGS=--swiglu").verdicts
    ((severity, message, _),) = found(verdict)["flag-refused"]
    assert (severity, message.endswith("dispatcher only")) == ("error", True)
    (verdict,) = judged("miles_faults", "MODEL_ARGS=--moe-token-dispatcher-type flex").verdicts
    assert "flag-refused" not in found(verdict)


def test_a_variable_that_a_ray_job_never_gets_is_told_from_one_that_its_workers_have() -> None:
    """OpenRLHF/OpenRLHF#1138: a variable set for the job does not reach its workers (fault D5)."""
    table = found(judged("miles_faults").verdicts[0])
    ((severity, message, repair),) = table["variable-not-passed"]
    assert severity == "warning"
    assert message.startswith("NCCL_DEBUG=INFO")
    assert "env_vars of --runtime-env-json" in repair


def test_variables_that_contradict_each_other_are_found() -> None:
    """radixark/miles#2139: the unified layout needs the second compressor."""
    table = found(judged("miles_faults", hardware="mi355x").verdicts[0])
    ((_, message, repair),) = table["variable-contradicted"]
    assert "needs SGLANG_OPT_USE_COMPRESSOR_V2=true" in message
    assert repair == "set SGLANG_OPT_USE_COMPRESSOR_V2=true"


def test_a_variable_that_a_release_has_removed_is_told_with_its_history() -> None:
    """sgl-project/sglang#28612 and #35060: the switch lost its meaning, then its reader."""
    table = found(judged("miles_faults").verdicts[0])
    ((severity, message, repair),) = table["variable-history"]
    assert severity == "warning"
    assert "sglang#28612" in message
    assert "sglang#35060: the switch is removed" in message
    assert repair == "drop it where sglang no longer has it"


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("CUDA_VISIBLE_DEVICES=0,1,2,3", []),
        ("CUDA_VISIBLE_DEVICES=0,1", ["CUDA_VISIBLE_DEVICES shows 2 devices, and the command uses 4 a node"]),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 HIP_VISIBLE_DEVICES=0,1,2,3", []),
        (
            "CUDA_VISIBLE_DEVICES=0,1,2,3 ROCR_VISIBLE_DEVICES=4,5,6,7",
            [
                "CUDA_VISIBLE_DEVICES=0,1,2,3, ROCR_VISIBLE_DEVICES=4,5,6,7: each layer obeys another one of these",
            ],
        ),
        ("CUDA_VISIBLE_DEVICES=", []),
    ],
)
def test_devices_that_the_script_hides_from_itself(tmp_path: Path, prefix: str, expected: list[str]) -> None:
    """ray-project/ray#46563: three variables for the visible devices, set by different layers."""
    script = tmp_path / "run.sh"
    script.write_text(f"{prefix} vllm serve Qwen/Qwen3-4B -tp 4\n")
    table = found(plan_launch(script).verdicts[0])
    assert [message for _, message, _ in table.get("visible-devices", [])] == expected


@pytest.mark.parametrize(
    ("shown", "devices", "reason"),
    [
        ("export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0,1,2,3}\n", 4, "as many as the script shows"),
        ("", 8, "the default, as it is not known"),
    ],
)
def test_devices_that_a_command_counts_are_those_shown(tmp_path: Path, shown: str, devices: int, reason: str) -> None:
    """Modelled on radixark/miles examples/lora/run-gpt-oss-20B-megatron-moe-lora.sh."""
    script = tmp_path / "run.sh"
    script.write_text(
        f"{shown}GPUS=$(echo \"$CUDA_VISIBLE_DEVICES\" | tr ',' '\\n' | wc -l)\n"
        "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node $GPUS --colocate "
        "--hf-checkpoint Qwen/Qwen3-4B --rollout-num-gpus-per-engine 4\n"
    )
    (verdict,) = plan_launch(script).verdicts
    assert verdict.launch.job is not None
    assert verdict.launch.job.num_gpus == devices
    assert verdict.launch.assumptions[0].startswith(f"{devices} GPUs a node: {reason}")
    assert "visible-devices" not in found(verdict)


def test_a_secret_of_the_script_is_in_neither_text_nor_json() -> None:
    report = judged("miles_faults")
    assert "hunter2" not in report.text()
    assert "hunter2" not in json.dumps(report.to_dict())
    assert report.to_dict()["launches"][0]["environment"]["trainer"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_options_behind_a_lost_backslash_are_told_to_be_lost() -> None:
    (verdict,) = judged("miles_detached").verdicts
    ((severity, message, repair),) = found(verdict)["flags-detached"]
    assert severity == "error"
    assert message.startswith("line 10: --tensor-model-parallel-size 2")
    assert repair.startswith("end every line of the command with \\")
    assert verdict.launch.job is not None
    assert verdict.launch.job.train is not None
    assert verdict.launch.job.train.tp == 1


def test_verl_fills_in_its_own_defaults() -> None:
    (verdict,) = judged("verl_legal").verdicts
    job = verdict.launch.job
    assert job is not None
    assert job.batch is not None
    assert (job.batch.global_batch, job.batch.optimizer_steps) == (128 * 16, 4)
    assert (job.batch.prompt_tokens, job.batch.response_tokens, job.batch.max_tokens_per_gpu) == (2048, 4096, 6144)
    assert job.engine is not None
    assert job.engine.max_running_requests == 256
    assert job.refit_bucket_bytes == 2048 << 20


def test_faults_of_a_verl_launch() -> None:
    (verdict,) = judged("verl_faults").verdicts
    assert rules(verdict, "error") == {"expert-grid", "experts-ep", "batch-steps"}
    table = found(verdict)
    key = "actor_rollout_ref.actor.megatron.expert_model_parallel_size"
    assert table["expert-grid"] == [
        ("error", "etp 1 · ep 6 · pp 1 = 6 does not divide world 8", f"ep 6 → 4 or 8 — {key}=4 on line 32")
    ]
    inert = " ".join(message for _, message, _ in table["flag-inert"])
    assert "ppo_max_token_len_per_gpu 8192 has no effect" in inert
    assert "fsdp_config.{fsdp_size} have no effect: the actor's strategy is megatron" in inert
    assert table["flag-unknown"][0][2] == "did you mean actor_rollout_ref.rollout.tensor_model_parallel_size?"


def test_vllm_counts_its_ranks() -> None:
    (verdict,) = judged("vllm_legal").verdicts
    job = verdict.launch.job
    assert job is not None
    assert job.engine is not None
    assert job.train is None
    engine = job.engine
    assert (engine.tp, engine.dp, engine.ep, engine.gpus_per_engine) == (1, 8, 8, 8)
    assert (engine.memory_fraction, engine.quantisation) == (0.85, "fp8")
    assert dict(verdict.launch.environment) == {"engine": {"VLLM_LOGGING_LEVEL": "INFO"}}


def test_faults_of_vllm_servers() -> None:
    """zai-org/GLM-4.7-Flash has 20 heads (vllm-project/vllm#52435: the remedy must be one that works, fault D10)."""
    first, second = judged("vllm_faults").verdicts
    assert rules(first, "error") == {"engine-heads"}
    ((_, message, repair),) = found(first)["engine-heads"]
    assert message == "20 attention heads do not divide by the engine's tp 8"
    assert repair.endswith("-tp 4 on line 6")
    assert rules(second, "error") == {"engine-no-experts"}
    assert found(second)["engine-no-experts"][0][2].endswith("drop --enable-expert-parallel")
    assert rules(second, "warning") == {"flag-not-read"}


def test_faults_of_sglang_servers() -> None:
    first, second = judged("sglang_faults").verdicts
    assert first.launch.job is not None
    assert (first.launch.job.nodes, first.launch.job.gpus_per_node) == (2, 4)
    assert first.launch.environment["engine"]["SGLANG_SKIP_CHECKPOINT_LOAD_CHECK"] == "1"
    assert rules(first, "error") == {"sglang-dp-attention"}
    table = found(first)
    assert table["sglang-dp-attention"][0][2] == "engine dp 3 → 2 or 4 — --dp-size 2 on line 10"
    assert table["sglang-a2a-ep"][0][1] == "all-to-all back end deepep silently sets engine ep 4 to tp 8"
    assert found(second)["not-known"] == [
        (
            "warning",
            "line 12: --tp $(nvidia-smi -L | wc -l): not known (a command's output: nothing is run), "
            "so judged without it",
            "give --set-variable GPUS=…",
        )
    ]


def test_a_stated_variable_settles_what_was_not_known() -> None:
    _, second = judged("sglang_faults", "GPUS=4").verdicts
    assert "not-known" not in found(second)
    assert second.launch.job is not None
    assert second.launch.job.engine is not None
    assert second.launch.job.engine.tp == 4


def test_a_stated_option_and_a_stated_variable_win_over_the_script() -> None:
    (verdict,) = judged("miles_faults", "--expert-model-parallel-size=2").verdicts
    assert "expert-grid" not in found(verdict)
    (verdict,) = judged("verl_faults", "actor_ep=8").verdicts
    assert {"expert-grid", "experts-ep"}.isdisjoint(found(verdict))
    (verdict,) = judged("verl_faults", "actor_rollout_ref.actor.megatron.expert_model_parallel_size=8").verdicts
    assert {"expert-grid", "experts-ep"}.isdisjoint(found(verdict))


@pytest.mark.parametrize(("name", "variables"), [("megatron_faults", ["NNODES=4"]), ("megatron_faults", [])])
def test_nodes_and_hardware_supply_what_the_script_lacks(name: str, variables: list[str]) -> None:
    report = plan_launch(SCRIPTS / f"{name}.sh", nodes=None if variables else 4, variables=variables)
    (verdict,) = report.verdicts
    assert verdict.launch.job is not None
    assert verdict.launch.job.nodes == 4
    assert "expert-grid" not in found(verdict)
    assert "give --hardware" in report.text()


def test_a_model_that_does_not_fit_is_refused_with_the_offload_that_it_needs() -> None:
    (verdict,) = judged("miles_legal", "--optimizer-offload-fraction=0", hardware="h100").verdicts
    assert {finding.rule for finding in verdict.findings if finding.severity == "error"} == {"memory-fits"}
    assert "optimizer_offload_fraction 0 → " in found(verdict)["memory-fits"][0][2]


def test_a_checkpoint_on_disk_says_its_sizes(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1000,
    }
    (folder / "config.json").write_text(json.dumps(config))
    script = tmp_path / "serve.sh"
    script.write_text(f"vllm serve {folder} --tensor-parallel-size 4\n")
    (verdict,) = plan_launch(script, hardware=H200).verdicts
    assert verdict.launch.job is not None
    assert verdict.launch.job.model.num_heads == 6
    assert rules(verdict, "error") == {"engine-heads"}
    (folder / "config.json").write_text("{")
    (verdict,) = plan_launch(script, hardware=H200).verdicts
    assert not verdict.launch.model_known
    assert "is no JSON" in found(verdict)["model-unknown"][0][1]


def test_sizes_of_a_sourced_file_are_read_where_it_is_here(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.sh").write_text(
        "NLAYERS=6\nMODEL_ARGS=(--num-layers $NLAYERS --hidden-size 256 --num-attention-heads 8 --swiglu\n"
        "  --group-query-attention --num-query-groups 2 --ffn-hidden-size 512 --vocab-size 1024)\n"
    )
    script = tmp_path / "run.sh"
    script.write_text(
        'SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
        'source "${SCRIPT_DIR}/models/mine.sh"\n'
        "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate ${MODEL_ARGS[@]} "
        "--pipeline-model-parallel-size 4 --rollout-num-gpus-per-engine 1\n"
    )
    (verdict,) = plan_launch(script).verdicts
    assert verdict.launch.job is not None
    assert verdict.launch.job.model.num_layers == 6
    assert found(verdict)["pipeline-even"][0][1] == "6 layers do not divide by 4 (pp 4, no split given)"


def test_flags_that_disagree_with_the_checkpoint_are_an_error(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 train.py --actor-num-gpus-per-node 8 --colocate --hf-checkpoint /data/Qwen3-30B-A3B "
        "--num-layers 40 --hidden-size 2048 --num-attention-heads 32 --rollout-num-gpus-per-engine 8\n"
    )
    table = found(plan_launch(script).verdicts[0])
    assert table["model-sizes"] == [
        (
            "error",
            "--num-layers 40, but qwen3-30b-a3b has 48 by the catalogue, as qwen3-30b-a3b",
            "--num-layers 40 → 48",
        )
    ]


def test_of_a_model_that_is_not_known_only_the_grid_is_judged(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 train.py --actor-num-gpus-per-node 8 --colocate --hf-checkpoint /data/NoSuchModel-9B "
        "--expert-model-parallel-size 8 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 3 "
        "--sequence-parallel --expert-tensor-parallel-size 1 --rollout-num-gpus-per-engine 8\n"
    )
    (verdict,) = plan_launch(script, hardware="h100").verdicts
    assert verdict.plan is None
    assert rules(verdict, "error") == {"expert-grid", "dense-grid", "device-connections"}
    assert "is no model of the catalogue" in found(verdict)["model-unknown"][0][1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo hello\n", "no launch command was found among 0 commands"),
        ("ls\nsource gone.sh\n", "line 2 sources gone.sh, which is not here"),
        ("if true; then\n  vllm serve x\n", "'fi' is missing for what line 1 opens"),
        ('vllm serve "x\n', 'a " is never closed'),
        ("while true; do :; done\n", "no launch command"),
    ],
)
def test_a_script_that_can_not_be_judged_is_refused_with_the_reason(tmp_path: Path, text: str, words: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    with pytest.raises(ConfigError) as error:
        plan_launch(script)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"), [(None, "can't be read"), (b"\xff\xfe\x00", "UTF-8"), (b"x" * (1 << 21), "more than")]
)
def test_a_file_that_is_no_script_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    script = tmp_path / "run.sh"
    if content is not None:
        script.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        plan_launch(script)


@pytest.mark.parametrize("item", ["TP", "=3", "two words=1"])
def test_a_malformed_variable_is_refused(item: str) -> None:
    with pytest.raises(ConfigError, match="states nothing"):
        judged("vllm_legal", item)


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    flag = tmp_path / "ran"
    script = tmp_path / "run.sh"
    script.write_text(
        f"touch {flag}\nX=$(touch {flag}; echo 8)\neval 'touch {flag}'\n"
        f"bash -c 'touch {flag}; vllm serve Qwen/Qwen3-4B'\n"
        f"vllm serve Qwen/Qwen3-4B -tp `touch {flag}` --port $((1 + 1)) <(touch {flag})\n"
    )
    assert len(plan_launch(script).verdicts) == 2
    assert not flag.exists()


@pytest.mark.parametrize(("name", "code"), [("vllm_legal", 0), ("vllm_faults", 1)])
def test_the_command_prints_the_verdict_and_exits_by_it(name: str, code: int) -> None:
    arguments = ["plan", "--from", str(SCRIPTS / f"{name}.sh"), "--hardware", H200]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code
    assert ("verdict   legal" in result.stdout) == (code == 0)
    report = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert report["legal"] == (code == 0)
    assert all(launch["memory"]["phases"] for launch in report["launches"])


def test_the_command_takes_variables_and_options_of_the_script() -> None:
    arguments = ["plan", "--from", str(SCRIPTS / "miles_faults.sh"), "--json"]
    stated = ["--set-variable", "--expert-model-parallel-size=2", "--nodes", "2"]
    (launch,) = json.loads(CliRunner().invoke(app, [*arguments, *stated]).stdout)["launches"]
    assert launch["train"]["ep"] == 2
    assert launch["devices"]["nodes"] == 2
    assert CliRunner().invoke(app, ["plan", "quickstart", "--set-variable", "A=1"]).exit_code == 2
