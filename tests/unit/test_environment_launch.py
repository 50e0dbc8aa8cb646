"""The launch: judged, applied, handed to the engine's process, filed with what was read, and never with a secret."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.errors import ConfigError
from lockstep.config.load import dump_resolved, flatten, load_run_config
from lockstep.config.schema import RunConfig
from lockstep.config.secrets import MASK
from lockstep.driver.environment import current_launch, declared, engine_environment, examine, launched
from lockstep.driver.folder import environment, no_recipe, open_run
from lockstep.driver.plan_commands import make_plan
from lockstep.recipes import load_recipe
from tests.unit.environment_planted import LAMBDAS, plant

SECRET = "hunter2-hunter2"


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in list(os.environ):
        if name.startswith(("VLLM_", "SGLANG_", "NCCL_", "PYTORCH_", "HF_TOKEN")):
            monkeypatch.delenv(name)


def resolved(*overrides: str) -> Any:
    return load_recipe("tiny-qwen3-moe", list(overrides))


def config_of(*overrides: str) -> RunConfig:
    return resolved(*overrides).config


def test_an_ordinary_launch_says_nothing_and_looks_into_no_package(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.environment import ledger

    monkeypatch.setattr(ledger, "ask", lambda *_: pytest.fail("a package was scanned"))
    with launched(config_of()) as launch:
        assert launch.ledger.rows == ()
    assert caplog.records == []


def test_strays_are_reported_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    config = config_of()
    with launched(config) as outer, launched(config) as inner:
        assert outer is inner
    assert len([record for record in caplog.records if "NCCL_DEBUG=INFO comes from the shell" in record.message]) == 1


def test_a_plan_judges_by_the_engines_own_environment_as_a_run_does(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    packages = tmp_path / "venv" / "lib" / "python3.12" / "site-packages"
    packages.mkdir(parents=True)
    plant(packages, "vllm", {"envs.py": LAMBDAS}, "0.32.0")
    made = resolved(
        "environment.strict=true", "rollout.process=separate", "rollout.engine=vllm", f"rollout.python={python}",
        'environment.engine.VLLM_UNUSED="1"',
    )  # fmt: skip
    judged = make_plan(made, {}).ledger
    assert judged == examine(made.config, {}, refuse=False)
    assert [(one.rule, one.severity) for one in judged.findings] == [("variable-unread", "error")]
    assert "vllm 0.32.0 declares it and no code uses it" in judged.errors[0].message


def test_trainer_and_engine_get_their_own_variables_alone() -> None:
    config = config_of(
        "rollout.process=separate",
        'environment.trainer.NVTE_ONLY_TRAINER="a=b c"',
        'environment.engine.VLLM_ONLY_ENGINE="x=y z"',
    )
    with launched(config):
        assert os.environ["NVTE_ONLY_TRAINER"] == "a=b c"
        assert "VLLM_ONLY_ENGINE" not in os.environ
        engine = engine_environment(config)
        assert engine["VLLM_ONLY_ENGINE"] == "x=y z"
        assert "NVTE_ONLY_TRAINER" not in engine
    assert "NVTE_ONLY_TRAINER" not in os.environ


def test_an_engine_in_the_trainers_process_has_its_variables_there() -> None:
    with launched(config_of('environment.engine.VLLM_ONLY_ENGINE="1"')):
        assert os.environ["VLLM_ONLY_ENGINE"] == "1"


def test_one_process_with_two_values_is_refused_when_loaded() -> None:
    two = ('environment.engine.MY_A="1"', 'environment.trainer.MY_A="2"')
    with pytest.raises(ConfigError, match="which are one process"):
        config_of(*two)
    assert declared(config_of(*two, "rollout.process=separate"))["engine"] == {"MY_A": "1"}


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
@pytest.mark.parametrize("process", ["trainer", "engine"])
def test_expandable_segments_with_cuda_ipc_are_refused_with_a_hint(name: str, process: str) -> None:
    """(I4) The first collective failed with "invalid argument"."""
    ipc = ("rollout.process=separate", "refit.transport=cuda_ipc")
    value = f'environment.{process}.{name}="max_split_size_mb:64, expandable_segments:True"'
    with pytest.raises(ConfigError, match=r"can't be shared by CUDA IPC[\s\S]*remove expandable_segments:True"):
        config_of(*ipc, value)
    config_of(*ipc, value.replace("True", "False"))
    config_of("rollout.process=separate", value)


def test_expandable_segments_of_the_shell_are_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """(I4)"""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    config = config_of("rollout.process=separate", "refit.transport=cuda_ipc")
    with (
        pytest.raises(ConfigError, match=r"comes from the shell[\s\S]*unset PYTORCH_CUDA_ALLOC_CONF"),
        launched(config),
    ):
        pass
    off = config_of(
        "rollout.process=separate",
        "refit.transport=cuda_ipc",
        'environment.trainer.PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False"',
    )
    with launched(off):
        assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"


def test_visibility_variables_that_disagree_stop_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """(I7)"""
    from lockstep.driver import environment as module

    monkeypatch.setattr(module, "platform_here", lambda: "rocm")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(ConfigError, match="disagree"), launched(config_of("device=auto")):
        pass


def test_a_strict_run_is_refused_before_anything_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("environment.strict=true", 'environment.engine.SGLANG_HEALTH_CHECK_TIMEOUT="2 min"')
    with pytest.raises(ConfigError, match="is no int"), launched(config):
        pass
    assert "SGLANG_HEALTH_CHECK_TIMEOUT" not in os.environ
    assert current_launch() is None
    lax = config_of("environment.strict=false", 'environment.engine.SGLANG_HEALTH_CHECK_TIMEOUT="2 min"')
    with launched(lax) as launch:
        assert [finding.severity for finding in launch.ledger.findings] == ["warning"]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        *((text, text) for text in ("1", "01", "0x10", "1.0", "1e3", "true", "True", "a=b==c", "a b", "[1]", " 1", "")),
        *(('"1"', "1"), ("'a b'", "a b"), ('"none"', "none"), ("2026-01-01", "2026-01-01"), ("{a = 1}", "{a = 1}")),
    ],
)  # fmt: skip
def test_a_variable_on_the_command_line_is_the_text_that_stands_there(written: str, value: str) -> None:
    assert config_of(f"environment.trainer.A={written}").environment.trainer == {"A": value}


@pytest.mark.parametrize(("text", "way_out"), [("1", '"1"'), ("true", "quote it"), ("1.0", "quote it")])
def test_a_variable_in_a_file_is_text(text: str, way_out: str, tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text(f'extends = "tiny-qwen3-moe"\n[environment.engine]\nA = {text}\n')
    with pytest.raises(ConfigError, match=r"environment\.engine\.A") as refused:
        load_recipe(str(file))
    assert way_out in str(refused.value)


def test_a_variable_that_a_recipe_sets_can_be_taken_out_and_no_other(tmp_path: Path) -> None:
    name, key = "SGLANG_DSV4_FP4_EXPERTS", "environment.engine.SGLANG_DSV4_FP4_EXPERTS"
    assert name in load_recipe("deepseek-v4-flash").config.environment.engine
    made = load_recipe("deepseek-v4-flash", [f"{key}=none"])
    assert name not in made.config.environment.engine
    assert made.config.environment.engine.keys() == load_recipe(
        "deepseek-v4-flash"
    ).config.environment.engine.keys() - {name}
    file = tmp_path / "my.toml"
    file.write_text(f'extends = "deepseek-v4-flash"\nunset = ["{key}"]\n')
    assert load_recipe(str(file)).config == made.config
    with pytest.raises(ConfigError, match="nothing sets it"):
        load_recipe("deepseek-v4-flash", [f"{key}_=none"])


@pytest.mark.parametrize("text", ['environment.trainer."A=B"="1"', 'environment.engine.A="\\u0000"'])
def test_what_no_environment_can_hold_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="environment"):
        config_of(text)


# --- what is written down ---------------------------------------------------------------------------------------------


def test_the_run_folder_has_the_ledger_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lockstep", "train", "--set", f"environment.trainer.HF_TOKEN={SECRET}"])
    made = resolved(f'environment.trainer.HF_TOKEN="{SECRET}"', 'environment.trainer.MY_LEVEL="a = b"')
    with launched(made.config) as launch, open_run(made, tmp_path / "run").folder as folder:
        assert os.environ["HF_TOKEN"] == SECRET
        os.environ.get("MY_LEVEL")
        folder.write_environment(environment(made.config))
        logging.getLogger("lockstep").warning("with %s", os.environ["HF_TOKEN"])
        assert launch.secrets == (SECRET,)
    written = {path: path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert not [path for path, text in written.items() if SECRET in text]
    rows = json.loads((tmp_path / "run" / "environment.json").read_text())["variables"]["rows"]
    assert [(row["process"], row["name"], row["effective"], row["read_at_run_time"]) for row in rows] == [
        ("trainer", "HF_TOKEN", MASK, True),
        ("trainer", "MY_LEVEL", "a = b", True),
    ]


def test_a_run_resumes_from_its_own_configuration_with_the_secret_in_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = resolved(f'environment.trainer.HF_TOKEN="{SECRET}"')
    file = tmp_path / "config.toml"
    file.write_text(dump_resolved(made))
    again = load_run_config(str(file), find_recipe=no_recipe).config
    assert flatten(again) == flatten(made.config)
    with pytest.raises(ConfigError, match=r"HF_TOKEN[\s\S]*export it"), launched(again):
        pass
    monkeypatch.setenv("HF_TOKEN", SECRET)
    with launched(again):
        assert os.environ["HF_TOKEN"] == SECRET


def test_a_refused_configuration_shows_no_secret() -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(f'environment.engine.HF_TOKEN="{SECRET}"', f'environment.trainer.HF_TOKEN="{SECRET}2"')
    assert SECRET not in str(refused.value)
    assert MASK in str(refused.value)


def test_flattened_configurations_show_no_secret() -> None:
    assert flatten(config_of(f'environment.engine.HF_TOKEN="{SECRET}"'))["environment.engine.HF_TOKEN"] == MASK
