"""Options of other projects: every row of the tables is a real flag and a real setting; what is read of a command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.errors import ConfigError
from lockstep.driver.launch_commands import judge_launch, plan_launch
from lockstep.topology import records
from lockstep.topology.catalogue import model_names
from lockstep.topology.commandline import ROWS, Surroundings, read_launch, read_launches
from lockstep.topology.flags_megatron import layer_frequency
from lockstep.topology.launch_flags import NotRead, integer, known_flags, nearest_flag
from lockstep.topology.launch_models import catalogue_name
from lockstep.topology.launch_programs import find_program, runtime_environment
from lockstep.topology.shell_script import follow
from lockstep.topology.shell_values import text_value

RECORDS = {
    "train": records.TrainLayout,
    "train.switches": records.MegatronSwitches,
    "memory": records.TrainMemory,
    "engine": records.EngineLayout,
    "batch": records.Batch,
    "job": records.Job,
    "model": records.ModelShape,
}
PASSED_THROUGH = ("override_transformer_config.", "override_optimizer_config.", "engine_kwargs.")
"""Parts of verl's keys behind which names are those of another project, so that verl's own files don't list them."""

CASES = [(project, flag) for project, rows in ROWS.items() for flag in rows]


@pytest.mark.parametrize("project", sorted(ROWS))
def test_every_row_is_a_flag_of_its_project_with_its_source(project: str) -> None:
    known = known_flags(project)
    for flag, row in ROWS[project].items():
        passed = project == "verl" and any(part in flag for part in PASSED_THROUGH)
        negated = f"--{flag.removeprefix('--no-')}" in known
        assert flag in known or passed or negated, f"{project} has no {flag}"
        assert row.source


@pytest.mark.parametrize("project", sorted(ROWS))
def test_every_row_is_a_setting_that_exists(project: str) -> None:
    for flag, row in ROWS[project].items():
        record, _, name = row.target.rpartition(".")
        if record != "launch":
            assert name in {item.name for item in fields(RECORDS[record])}, f"{flag}: {row.target}"


def command(project: str, arguments: str) -> str:
    starts = {
        "megatron": "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 64 "
        "--num-attention-heads 4",
        "miles": "python train.py --actor-num-gpus-per-node 8 --colocate",
        "verl": "python -m verl.trainer.main_ppo",
        "vllm": "vllm serve",
        "sglang": "python -m sglang.launch_server",
    }
    return f"{starts[project]} {arguments}\n"


@pytest.mark.parametrize(("project", "flag"), CASES)
def test_every_flag_of_the_tables_is_read(project: str, flag: str) -> None:
    """A value that the row's conversion takes ends up in the settings, under the row's target."""
    row = ROWS[project][flag]
    text = ""
    if row.convert is not None:
        candidates = (
            "2",
            "True",
            "full",
            "selective",
            "uniform",
            "blockwise",
            "bf16",
            "fp32",
            "fp8",
            "megatron",
            "thd",
        )
        more = ("cpu", "abort", "auto", "softmax", "vllm", "contiguous", "[0]*1+[1]*3", "null", "x")
        text = next(value for value in (*candidates, *more) if _takes(row.convert, value))
    argument = f"{flag}={text}" if project == "verl" else f"{flag} '{text}'" if text else flag
    launch = read_launch(command(project, argument))
    expected = row.present if row.convert is None else row.convert(text)
    assert launch.settings[row.target] == expected
    assert launch.origins[row.target].flag == flag
    assert "flag-unknown" not in {finding.rule for finding in launch.findings}


def _takes(convert: object, value: str) -> bool:
    try:
        assert callable(convert)
        convert(value)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("arguments", "rule", "words"),
    [
        ("--tensor-model-parallel-size two", "flag-value", "'two' is no whole number"),
        ("--tensor-model-parallel-size", "flag-value", "has no value"),
        ("--tensor-model-parallel-size 99999999999999999999", "flag-value", "is no whole number"),
        ("--tensor-model-parallel-size 4 --tensor-model-parallel-size 2", "flag-twice", "the last one counts"),
        ("--tensor-model-parallel-sizes 4", "flag-unknown", "--tensor-model-parallel-sizes is not among"),
        ("--bf16 '--fp8-format hybrid'", "flag-quoted", "'--fp8-format hybrid' is one word"),
        ("--recompute-granularity half", "flag-not-read", "'half' is not read here"),
        ("--tensor-model-parallel-size 0 --pipeline-model-parallel-size 1000000", "no-job", "is beyond"),
    ],
)
def test_odd_options_are_told(arguments: str, rule: str, words: str) -> None:
    launch = read_launch(command("megatron", arguments))
    assert any(finding.rule == rule and words in finding.message for finding in launch.findings), launch.findings


def test_an_unambiguous_abbreviation_is_the_flag_as_argparse_has_it() -> None:
    launch = read_launch(command("megatron", "--tensor-model-parallel 4 --pipeline-model-parallel-s 2"))
    assert (launch.settings["train.tp"], launch.settings["train.pp"]) == (4, 2)


def test_an_equals_sign_and_a_space_are_the_same() -> None:
    one = read_launch(command("megatron", "--tensor-model-parallel-size=4 --bf16"))
    two = read_launch(command("megatron", "--tensor-model-parallel-size 4 --bf16"))
    assert one.settings == two.settings


def test_a_value_may_look_like_an_option_where_one_is_due() -> None:
    launch = read_launch(command("miles", "--rollout-stop '--end of it' --rollout-batch-size 8"))
    assert not {"flag-quoted", "flag-unknown"} & {finding.rule for finding in launch.findings}


def test_a_value_that_begins_with_a_hyphen_is_no_flag() -> None:
    launch = read_launch(command("verl", "actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 trainer.nnodes=2"))
    assert launch.settings["launch.fsdp_size"] == -1
    launch = read_launch(command("megatron", "--seed -1 --bf16"))
    assert launch.settings["memory.weight_dtype"] == "bf16"


@pytest.mark.parametrize(
    ("text", "dense"),
    [("1", 0), ("[0]*3+[1]*75", 3), ("[0]*1+[1]*46", 1), ("[1, 1, 1]", 0), ("[0,1,1]", 1), ("([0]*2+[1]*2)", None)],
)
def test_leading_dense_layers_of_a_frequency(text: str, dense: int | None) -> None:
    if dense is None:
        with pytest.raises(ValueError, match="is no list"):
            layer_frequency(text)
    else:
        assert layer_frequency(text) == dense


@pytest.mark.parametrize("text", ["[1]*2+[0]*2", "2"])
def test_a_frequency_with_dense_layers_in_between_is_not_read(text: str) -> None:
    with pytest.raises(NotRead):
        layer_frequency(text)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("/data/Qwen3-30B-A3B-FP8/", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-30B-A3B-Base", "qwen3-30b-a3b"),
        ("${BASE_DIR}/Qwen3-30B-A3B_torch_dist", "qwen3-30b-a3b"),
        ("zai-org/GLM-5.2", "glm-5_2"),
        ("models/glm5.2-744B-A40B.sh", "glm-5_2"),
        ("zai-org/GLM-4.7-Flash", "glm-4_7-flash"),
        ("deepseek-ai/DeepSeek-V4-Flash", "deepseek-v4-flash"),
        ("DeepSeek-V4-Flash-4layer", "deepseek-v4-flash-4layer"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("Qwen/Qwen3-30B-A3B-Extra", None),
        ("Qwen/Qwen3-8B", None),
        ("", None),
        ("/" * 5000, None),
    ],
)
def test_a_path_names_a_model_of_the_catalogue_or_none(path: str, name: str | None) -> None:
    assert catalogue_name(path) == name


@pytest.mark.parametrize("name", model_names())
def test_every_model_of_the_catalogue_is_found_by_its_own_name(name: str) -> None:
    assert catalogue_name(f"org/{name}") == name


def test_a_runtime_environment_keeps_values_with_equals_signs_and_blanks() -> None:
    text = '{"env_vars": {"A": "x=1 y", "B": 2, "C": ""}}'
    variables = runtime_environment(text_value(text))
    assert variables is not None
    assert {name: value.known for name, value in variables.items()} == {"A": "x=1 y", "B": "2", "C": ""}
    assert runtime_environment(text_value("{'a': 1}")) is None
    assert runtime_environment(text_value("[" * 100_000)) is None


@pytest.mark.parametrize(
    ("text", "project"),
    [
        ("python -m torch.distributed.run --nproc-per-node 8 pretrain_gpt.py --bf16", "megatron"),
        ("env A=1 numactl -N 0 torchrun pretrain_vlm.py", "megatron"),
        ("uv run python train_async.py --rollout-batch-size 8", "miles"),
        ("python train.py --epochs 3", None),
        ("python3 -u -m verl.experimental.fully_async_policy.fully_async_main_ppo a.b=c", "verl"),
        ("python -m verl.model_merger merge", None),
        ("CUDA_VISIBLE_DEVICES=0 vllm serve x", "vllm"),
        ("pip install vllm sglang", None),
        ("python3 -m sglang.launch_server --model-path x", "sglang"),
        ("docker run --gpus all image python3 -m sglang.launch_server --tp 2", "sglang"),
        ("pkill -9 sglang", None),
    ],
)
def test_programs_are_told_from_other_commands(text: str, project: str | None) -> None:
    (invocation,) = follow(text + "\n").invocations
    program = find_program(invocation)
    assert (program.project if program else None) == project


def test_wrappers_say_nodes_devices_and_environment() -> None:
    text = "A=1 srun -N 2 --export=ALL,B=2 torchrun --nproc_per_node=4 --nnodes 3 pretrain_gpt.py --bf16\n"
    (invocation,) = follow(text).invocations
    program = find_program(invocation)
    assert program is not None
    wrapper = {name: value.known for name, value in program.wrapper.items()}
    assert (wrapper["nproc-per-node"], wrapper["nnodes"], wrapper["nodes"]) == ("4", "3", "2")
    assert {name: value.known for name, value in program.environment.items()} == {"A": "1", "B": "2"}


def test_several_launches_of_a_script_are_read_and_the_trainer_is_the_main_one() -> None:
    text = command("sglang", "--model-path Qwen/Qwen3-4B --tp 2") + command("miles", "--rollout-num-gpus-per-engine 2")
    assert [launch.project for launch in read_launches(text)] == ["sglang", "miles"]
    assert read_launch(text).project == "miles"


def test_a_loop_over_hosts_is_one_launch() -> None:
    text = f'for host in a b c; do ssh $host "{command("vllm", "Qwen/Qwen3-4B -tp 2").strip()}"; done\n'
    assert len(read_launches(text)) == 1


def test_a_separate_pool_of_rollout_devices_is_counted() -> None:
    text = (
        "python train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus 16 --rollout-batch-size 8\n"
    )
    job = read_launch(text).job
    assert job is not None
    assert (job.nodes, job.gpus_per_node, job.rollout_gpus, job.train_world) == (4, 8, 16, 16)
    assert not job.colocated


@pytest.mark.parametrize("project", sorted(ROWS))
def test_the_nearest_flag_is_found(project: str) -> None:
    flag = next(iter(ROWS[project]))
    assert nearest_flag(flag + "x", project) == flag


def test_numbers_are_whole_and_bounded() -> None:
    assert integer(" -3 ") == -3
    for text in ("", "1.5", "1e3", "0x10", "9" * 30, "1_000"):
        with pytest.raises(ValueError, match="no whole number"):
            integer(text)


WORDS = st.sampled_from([*(flag for _, flag in CASES), "1", "0", "-1", "true", "x", "[0]*2", "{}", "a.b=c", "", "é"])


@given(st.sampled_from(sorted(ROWS)), st.lists(st.tuples(WORDS, st.sampled_from([" ", "=", " '' "])), max_size=12))
@settings(max_examples=150, deadline=None)
def test_random_options_give_a_launch_or_the_error(project: str, words: list[tuple[str, str]]) -> None:
    text = command(project, "".join(word + between for word, between in words))
    try:
        launch = read_launch(text, Surroundings(nodes=1))
    except ConfigError:
        return
    assert launch.job is not None or any(f.severity == "error" for f in launch.findings)
    verdict = judge_launch(launch)
    assert verdict.legal == all(finding.severity != "error" for finding in verdict.findings)


def test_reading_commands_needs_no_torch_and_no_transformers() -> None:
    program = (
        "import sys, lockstep.topology.commandline, lockstep.driver.launch_commands\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


LEAKS = ("hf_abcdefghijk", "wk_12345678")
MASKED = """\
export SGLANG_API_KEY=wk_12345678
export HF_TOKEN=hf_abcdefghijk
ray job submit --runtime-env-json='{"env_vars": {"WANDB_API_KEY": "wk_12345678", "HF_TOKEN": "hf_abcdefghijk"}}' -- \\
    python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --hf-checkpoint Qwen/Qwen3-4B \\
    --rollout-num-gpus-per-engine 2 --rollout-batch-size 8 --n-samples-per-prompt 8 --tensor-model-parallel-size 2 \\
    --input-key prompt --input-key question \\
    --wandb-key wk_12345678 --wandb-key ${K}hf_abcdefghijk "--wandb-key wk_12345678" --use-wandb
    --wandb-key wk_12345678 --wandb-project x
"""


def test_secrets_of_a_script_are_masked_in_text_and_data(tmp_path: Path) -> None:
    """The value of ``--wandb-key`` stood in messages, variables in the data of a repair."""
    script = tmp_path / "run.sh"
    script.write_text(MASKED)
    report = plan_launch(script, hardware="h200")
    rules = {finding.rule for verdict in report.verdicts for finding in verdict.findings}
    assert {"flag-twice", "flags-detached", "device-connections", "variable-not-passed"} <= rules
    for text in (report.text(), json.dumps(report.to_dict())):
        assert not [leak for leak in LEAKS if leak in text]
        assert "<secret>" in text
        assert "--input-key prompt is overridden" in text  # a column of the data set
