"""What crosses to a child, what is set in this process and undone, what is a secret, and what was looked up."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.errors import ConfigError
from lockstep.config.secrets import MASK, is_secret, masked, shown, shown_config
from lockstep.environment.processes import applied, child_environment, crosses, shell_environment
from lockstep.environment.recorded import recorded_reads
from lockstep.environment.secrets import mask_arguments, mask_text, masked_records, secret_values

ODD_VALUES = ["a=b=c", "two words", "line\nline", "", " ", "ü", "$HOME", "'\"", "x" * 100_000]


# --- children ---------------------------------------------------------------------------------------------------------


def test_only_listed_variables_cross_to_a_child() -> None:
    """(D14) A shell with exported functions, megabytes of text and other programs' variables."""
    shell = {
        "PATH": "/bin",
        "LD_LIBRARY_PATH": "/lib",
        "NCCL_DEBUG": "INFO",
        "VLLM_USE_DEEP_GEMM": "0",
        "CUDA_VISIBLE_DEVICES": "1",
        "PYTHONPATH": "/x",
        "BASH_FUNC_module%%": "() {  eval `modulecmd`\n}",
        "LS_COLORS": "x" * 2_000_000,
        "EDITOR": "vi",
        "AWS_SECRET_ACCESS_KEY": "s",
        "HF_TOKEN": "s",
        "VLLM_API_KEY": "s",
    }
    crossed = child_environment(shell, {})
    assert crossed.keys() == {
        *("PATH", "LD_LIBRARY_PATH", "NCCL_DEBUG", "VLLM_USE_DEEP_GEMM", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")
    }


def test_a_declared_variable_reaches_the_child_over_the_shells() -> None:
    """(D5) Also one that would not cross by itself, and a secret."""
    crossed = child_environment({"NCCL_DEBUG": "WARN"}, {"NCCL_DEBUG": "INFO", "EDITOR": "vi", "HF_TOKEN": "s"})
    assert crossed == {"NCCL_DEBUG": "INFO", "EDITOR": "vi", "HF_TOKEN": "s"}


@pytest.mark.parametrize("value", ODD_VALUES)
def test_values_reach_a_real_child_as_they_are(value: str) -> None:
    code = "import os, sys; sys.stdout.buffer.write(os.environb[b'SGLANG_ODD'])"
    environment = child_environment(os.environ, {"SGLANG_ODD": value})
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert done.stdout.decode() == value


def test_a_secret_is_taken_from_the_shell() -> None:
    assert child_environment({"HF_TOKEN": "s"}, {"HF_TOKEN": MASK}) == {"HF_TOKEN": "s"}


@pytest.mark.parametrize("shell", [{}, {"HF_TOKEN": ""}])
def test_a_secret_that_the_shell_lacks_is_refused_with_the_way_out(shell: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"HF_TOKEN[\s\S]*export it before the start"):
        child_environment(shell, {"HF_TOKEN": MASK})


@given(st.text(min_size=1))
def test_no_name_of_a_secret_crosses(name: str) -> None:
    assert not (is_secret(name) and crosses(name))


# --- this process -----------------------------------------------------------------------------------------------------


def test_variables_are_in_force_and_then_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_OLD", "shell")
    monkeypatch.delenv("NVTE_NEW", raising=False)
    with applied({"NVTE_OLD": "run", "NVTE_NEW": "a=b c"}):
        assert (os.environ["NVTE_OLD"], os.environ["NVTE_NEW"]) == ("run", "a=b c")
        shell = shell_environment()
        assert (shell["NVTE_OLD"], "NVTE_NEW" in shell) == ("shell", False)
    assert (os.environ["NVTE_OLD"], "NVTE_NEW" in os.environ) == ("shell", False)


def test_what_somebody_else_sets_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_OLD", "shell")
    with applied({"NVTE_OLD": "run"}):
        os.environ["NVTE_OLD"] = "library"
    assert os.environ["NVTE_OLD"] == "library"


def test_the_trainers_variables_do_not_reach_a_child_started_under_them() -> None:
    with applied({"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}):
        child = child_environment(shell_environment(), {"VLLM_BATCH_INVARIANT": "1"})
    assert "NVTE_FP8_BLOCK_SCALING_FP32_SCALES" not in child
    assert child["VLLM_BATCH_INVARIANT"] == "1"


# --- secrets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *(
            "HF_TOKEN",
            "WANDB_API_KEY",
            "AWS_SECRET_ACCESS_KEY",
            "GITHUB_PAT",
            "DB_PASSWORD",
            "OPENAI_API_KEY",
            "DB_PASS",
        ),
        *(
            "AZURE_STORAGE_ACCOUNT_KEY",
            "hf_token",
            "MY_SECRET_2",
            "SLACK_TOKEN_FILE",
            "GOOGLE_CREDENTIALS",
            "ACCESS_TOKEN_1",
        ),
    ],
)
def test_secrets_are_known_by_their_name(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("TOKENIZERS_PARALLELISM", "SGLANG_MORI_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "MAX_TOKENS", "VLLM_MAX_TOKEN"),
        *("PATH", "KEY", "NCCL_DEBUG", "PYTHONHASHSEED", "PASSTHROUGH", "MONKEY", "TOKEN_LIMIT", "COMPASS"),
    ],
)
def test_other_names_are_none(name: str) -> None:
    assert not is_secret(name)


def test_a_configuration_shows_no_secret() -> None:
    config = {"name": "x", "environment": {"strict": True, "trainer": {"HF_TOKEN": "s", "A": "1"}, "engine": {}}}
    shown_text = shown_config(config)["environment"]
    assert shown_text == {"strict": True, "trainer": {"HF_TOKEN": MASK, "A": "1"}, "engine": {}}
    assert config["environment"]["trainer"]["HF_TOKEN"] == "s"  # pyright: ignore[reportIndexIssue, reportArgumentType]
    assert shown(("environment", "engine", "WANDB_API_KEY"), "s") == MASK
    assert shown(("prompt", "system_token"), "text") == "text"
    assert masked("HF_TOKEN", "") == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "environment.trainer.HF_TOKEN=abc"], ["--set", f"environment.trainer.HF_TOKEN={MASK}"]),
        (["--set", "environment.trainer.A=a=b"], ["--set", "environment.trainer.A=a=b"]),
        (["train", "x-abcdefgh-y"], ["train", f"x-{MASK}-y"]),
        (["--set", "HF_TOKEN="], ["--set", "HF_TOKEN="]),
    ],
)
def test_a_command_line_shows_no_secret(arguments: list[str], expected: list[str]) -> None:
    assert mask_arguments(arguments, ["abcdefgh"]) == expected


def test_a_secret_that_holds_another_goes_as_a_whole() -> None:
    values = secret_values({"A_TOKEN": "abcdef", "B_TOKEN": "abcdefghi"}, {"C": "innocent", "D_TOKEN": "x"})
    assert values == ("abcdefghi", "abcdef")
    assert mask_text("abcdefghi abcdef x innocent", values) == f"{MASK} {MASK} x innocent"


@contextmanager
def logged_to(lines: list[str]) -> Iterator[logging.Logger]:
    """A logger with a handler of its own, which passes nothing on to the root's: transformers has such a one."""
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(logging.Formatter().format(record))  # type: ignore[method-assign]
    logger = logging.getLogger("lockstep-test-secrets")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield logger
    finally:
        logger.removeHandler(handler)


def test_every_loggers_records_are_masked_in_message_arguments_traceback_and_stack() -> None:
    lines: list[str] = []
    before = logging.getLogRecordFactory()
    with masked_records(["hunter2-hunter2"]), logged_to(lines) as logger:
        logger.error("token %s in %s", "hunter2-hunter2", {"a": "hunter2-hunter2"})
        logger.error("plain 100%")
        try:
            raise ValueError("bad hunter2-hunter2")
        except ValueError:
            logger.exception("failed")
        logger.error("too few %s %s", "hunter2-hunter2")
        logger.error("here", stack_info=True)  # the line of code is part of it: hunter2-hunter2
    assert "hunter2" not in "".join(lines)
    assert lines[0] == f"token {MASK} in {{'a': '{MASK}'}}"
    assert lines[1] == "plain 100%"
    assert f"ValueError: bad {MASK}" in lines[2]
    assert lines[3] == f"too few %s %s ('{MASK}',)"
    assert logging.getLogRecordFactory() is before


def test_a_record_without_a_secret_is_left_as_it_is() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    with masked_records(["hunter2-hunter2"]), logged_to([]) as logger:
        logger.addHandler(handler)
        try:
            raise ValueError("plain")
        except ValueError:
            logger.exception("in %s", "step 3")
        logger.removeHandler(handler)
    assert (records[0].msg, records[0].args) == ("in %s", ("step 3",))
    assert records[0].exc_info is not None


# --- lookups ----------------------------------------------------------------------------------------------------------


def test_every_way_to_look_a_variable_up_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOK_INDEX", "1")
    with recorded_reads() as reads:
        values = [
            os.environ["LOOK_INDEX"],
            os.environ.get("LOOK_GET"),
            os.getenv("LOOK_GETENV", "x"),
            "LOOK_IN" in os.environ,
        ]
        assert os.environ.copy()["LOOK_INDEX"] == dict(os.environ)["LOOK_INDEX"] == "1"
        os.environ["LOOK_WRITTEN"] = "1"
        del os.environ["LOOK_WRITTEN"]
    os.environ.get("LOOK_LATER")
    assert values == ["1", None, "x", False]
    assert {name for name in reads.names() if name.startswith("LOOK_")} == {
        "LOOK_INDEX",
        "LOOK_GET",
        "LOOK_GETENV",
        "LOOK_IN",
    }
    assert reads.as_dict()["LOOK_GETENV"] == ["tests"]


def test_a_copy_of_everything_is_no_lookup() -> None:
    with recorded_reads() as reads:
        whole = [{**os.environ}, dict(os.environ), os.environ | {}, list(os.environ.items()), sorted(os.environ)]
    assert whole[0] == whole[1] == whole[2] == dict(whole[3])
    assert not set(reads.names()) & {"PATH", "HOME"}


def test_recorders_nest_and_leave_no_trace() -> None:
    kind = type(os.environ)
    with recorded_reads() as outer:
        with recorded_reads() as inner:
            os.environ.get("LOOK_BOTH")
        os.environ.get("LOOK_OUTER")
    assert {"LOOK_BOTH", "LOOK_OUTER"} <= set(outer.names())
    assert "LOOK_OUTER" not in inner.names()
    assert type(os.environ) is kind
