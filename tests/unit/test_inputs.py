"""What a run reads from outside is told apart by content; a reward whose package is broken is told as a reward."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.config.schema import RewardConfig
from lockstep.driver.inputs import changed_inputs, fingerprints
from lockstep.recipes import load_recipe
from lockstep.tasks.build import build_task
from lockstep.tasks.errors import TaskError


def with_reward(name: str):
    config = load_recipe("tiny-qwen3-moe").config
    return config.model_copy(
        update={"task": config.task.model_copy(update={"rewards": (RewardConfig(name=name),)})},
    )


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "ownpackage"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "judge.py").write_text("def f(problem, completion, stopped):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("ownpackage")]:
        monkeypatch.delitem(sys.modules, name)
    return folder


def test_the_module_of_a_reward_is_told_apart_by_its_content(package: Path) -> None:
    before = fingerprints(with_reward("ownpackage.judge:f"))
    (package / "judge.py").write_text("def f(problem, completion, stopped):\n    return 2.0\n")
    assert changed_inputs(before, fingerprints(with_reward("ownpackage.judge:f"))) == ["task.rewards[0]"]


@pytest.mark.parametrize(
    ("initialises", "name", "told"),
    [
        ("raise RuntimeError('boom')", "ownpackage.judge:f", "importing module 'ownpackage.judge' failed: RuntimeE"),
        ("import sys; sys.exit(0)", "ownpackage.judge:f", "importing module 'ownpackage.judge' failed: SystemExit: 0"),
        ("", "ownpackage.nothing:f", "module 'ownpackage.nothing' can't be found"),
        ("", "ownpackage.judge.deeper:f", "module 'ownpackage.judge.deeper' can't be found"),
        ("", "nosuchpackage.judge:f", "module 'nosuchpackage' can't be found"),
    ],
)
def test_a_reward_in_a_broken_package_is_told_as_one(package: Path, initialises: str, name: str, told: str) -> None:
    """It was a traceback at the start, and exit code 0 without a step where the package calls sys.exit()."""
    (package / "__init__.py").write_text(initialises)
    config = with_reward(name)
    assert "task.rewards[0]" not in fingerprints(config)
    with pytest.raises(TaskError, match=told):
        build_task(config.task)
