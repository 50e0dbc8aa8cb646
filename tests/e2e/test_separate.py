"""An engine in a process of its own that can't start or is killed: the command says so, without a traceback."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from tests.e2e.conftest import SMALL, run, start

SEPARATE = (*SMALL, "rollout.process=separate")


def test_an_interpreter_that_is_not_there_is_bad_usage(tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "run", (*SEPARATE, f"rollout.python={tmp_path}/nobody"))
    assert code == 2, err
    assert "Traceback" not in err
    assert f"rollout.python: there is no program {tmp_path}/nobody" in err


def test_an_engine_that_its_own_environment_lacks_is_bad_usage_there_too(tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "run", (*SEPARATE, "rollout.engine=vllm"))
    assert code == 2, err
    assert "Traceback" not in err
    assert "vLLM is not installed in this environment" in err
    assert "rollout.python" in err


def test_a_killed_engine_ends_the_run_with_its_signal(tmp_path: Path) -> None:
    process = start(tmp_path / "run", (*SEPARATE, "steps=10000"))
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 2/"):
            break
    (engine,) = [
        one for one in psutil.Process(process.pid).children() if "lockstep.refit.engine_child" in one.cmdline()
    ]
    os.kill(engine.pid, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    assert "Traceback" not in err
    assert f"the engine's process {engine.pid} is gone (signal 9)" in err
