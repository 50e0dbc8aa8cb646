"""The command line: exit codes, what goes to stdout and to stderr, JSON, and a start without heavy imports."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from lockstep import __version__, cli

GOOD_TOML = """
name = "mine"
steps = 3
[model]
source = "random"
model_type = "qwen3"
[task]
kind = "arithmetic"
[[gate.bounds]]
bound = 0.01
evidence = "test"
"""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the entry point in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["lockstep", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


@pytest.fixture
def recipe_file(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD_TOML)
    return str(path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand in for the loop: records how it was called, and returns ``exit_code``."""
    seen: dict[str, Any] = {"exit_code": 0}

    def train(resolved: Any, run_dir: Path | None, *, as_json: bool) -> int:
        seen["train"] = (resolved, run_dir, as_json)
        if "error" in seen:
            raise seen["error"]
        return seen["exit_code"]

    def export(run_dir: Path, out: Path, step: int | None) -> Path:
        seen["export"] = (run_dir, out, step)
        return out

    loop = types.ModuleType("lockstep.loop")
    loop.__dict__.update(train=train, export=export)
    monkeypatch.setitem(sys.modules, "lockstep.loop", loop)
    return seen


def test_version_and_help_are_done(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"lockstep {__version__}\n"
    assert run(monkeypatch, "--help") == 0
    assert "doctor" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        ["doctor"],
        ["train"],
        ["report"],
        ["export"],
        ["recipes", "list"],
        ["recipes", "show"],
        ["recipes", "diff"],
        ["recipes", "check"],
    ],
)
def test_every_commands_help_has_an_example(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *command, "--help") == 0
    text = capsys.readouterr().out
    assert "Example" in text
    assert f"lockstep {' '.join(command)}" in text


@pytest.mark.parametrize("arguments", [["nonsense"], ["train"], ["report", "/nowhere"], ["export", "/nowhere", "x"]])
def test_bad_usage_exits_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert capsys.readouterr().out == ""


def test_a_refused_configuration_exits_2_on_stderr_without_a_traceback(
    recipe_file: str, calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "train", recipe_file, "--set", "trainer.lr=1", "--set", "steps=0") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "did you mean trainer.learning_rate?" in captured.err
    assert "steps = 0  [--set]" in captured.err
    assert "Traceback" not in captured.err
    assert "train" not in calls


def test_an_unknown_recipe_is_refused_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "train", "quikstart") == 2
    assert 'did you mean "quickstart"?' in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1, 130])
def test_train_passes_the_configuration_on_and_exits_as_the_loop_says(
    code: int, recipe_file: str, calls: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls["exit_code"] = code
    run_dir = tmp_path / "run"
    assert run(monkeypatch, "train", recipe_file, "--set", "steps=5", "--run-dir", str(run_dir)) == code
    resolved, passed, as_json = calls["train"]
    assert (resolved.config.steps, resolved.origins["steps"], passed, as_json) == (5, "--set", run_dir, False)
    run(monkeypatch, "train", recipe_file, "--json")
    assert calls["train"][1:] == (None, True)


@pytest.mark.parametrize(("error", "code"), sorted(cli.TOLD_ERRORS.items()))
def test_an_error_that_says_what_to_do_shows_its_text_alone(
    error: tuple[str, str],
    code: int,
    recipe_file: str,
    calls: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module, name = error
    refusal = getattr(importlib.import_module(module), name)
    takes_a_list = name == "ConfigError" or module == "lockstep.checkpoint.errors"
    calls["error"] = refusal("row 3 has no answer", []) if takes_a_list else refusal("row 3 has no answer")
    assert run(monkeypatch, "train", recipe_file) == code
    captured = capsys.readouterr()
    assert "row 3 has no answer" in captured.err
    assert "Traceback" not in captured.err


def test_an_unexpected_error_keeps_its_traceback_and_exits_1(recipe_file: str) -> None:
    code = (
        "import sys, types\n"
        "loop = types.ModuleType('lockstep.loop')\n"
        "def train(resolved, run_dir, as_json): raise RuntimeError('engine fell over')\n"
        "loop.train = train\n"
        "sys.modules['lockstep.loop'] = loop\n"
        f"sys.argv = ['lockstep', 'train', {recipe_file!r}]\n"
        "from lockstep.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "RuntimeError: engine fell over" in done.stderr


def test_export_passes_the_step_on_and_refuses_a_full_folder(
    calls: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(monkeypatch, "export", str(tmp_path), str(out), "--step", "4") == 0
    assert calls.pop("export") == (tmp_path, out, 4)
    assert capsys.readouterr().out.strip() == str(out)
    assert run(monkeypatch, "export", str(tmp_path), str(tmp_path)) == 0
    (tmp_path / "something").write_text("x")
    calls.pop("export")
    assert run(monkeypatch, "export", str(tmp_path), str(tmp_path)) == 2
    assert "export" not in calls


def test_report_prints_the_path_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = types.ModuleType("lockstep.metrics.report")
    module.__dict__["write_report"] = lambda run_dir: run_dir / "report.html"
    monkeypatch.setitem(sys.modules, "lockstep.metrics.report", module)
    assert run(monkeypatch, "report", str(tmp_path)) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")


def test_recipes_show_prints_a_configuration_that_loads_again(
    recipe_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "recipes", "show", recipe_file, "--set", "steps=9") == 0
    again = tmp_path / "again.toml"
    again.write_text(capsys.readouterr().out)
    assert run(monkeypatch, "recipes", "show", str(again), "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["steps"] == 9
    assert shown["origins"]["steps"].startswith(f"file {again}:")


def test_recipes_diff_prints_only_what_differs(
    recipe_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.toml"
    other.write_text(f'extends = "{recipe_file}"\nsteps = 4\n[model]\nsource = "path"\npath = "/m"\n')
    assert run(monkeypatch, "recipes", "diff", recipe_file, str(other), "--json") == 0
    differences = json.loads(capsys.readouterr().out)
    assert differences["steps"] == [3, 4]
    assert differences["model.source"] == ["random", "path"]
    assert differences["model.path"] == [None, "/m"]
    assert not any(key.startswith(("trainer", "task", "gate")) for key in differences)


def test_recipes_list_and_check_cover_the_catalogue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "recipes", "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"quickstart", "tiny-qwen3-moe", "tiny-deepseek-v4"} <= set(listed)
    assert all(listed.values())
    code = run(monkeypatch, "recipes", "check", "--json")
    checked = json.loads(capsys.readouterr().out)
    assert set(checked) == set(listed)
    assert checked == {name: [] for name in listed}
    assert code == 0


def test_recipes_check_fails_when_a_recipe_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep import recipes

    quickstart = recipes.find_recipe("quickstart")
    broken = quickstart.model_copy(update={"steps": 1})  # warm-up and decay now lie after the end
    monkeypatch.setitem(recipes._recipes, "broken", lambda: broken)
    assert run(monkeypatch, "recipes", "check") == 1
    output = capsys.readouterr().out
    assert "broken: refused" in output
    assert "trainer.warmup_steps = 2" in output


def test_two_recipes_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep import recipes

    recipes.recipe_names()
    with pytest.raises(ValueError, match="two recipes are named 'quickstart'"):
        recipes.recipe("quickstart")(lambda: recipes.find_recipe("quickstart"))


def test_doctor_exits_1_with_the_way_out_when_something_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.hardware import doctor

    assert run(monkeypatch, "doctor", "--json") == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []
    monkeypatch.setattr(doctor, "missing_dependencies", lambda: [("torch is missing", 'pip install "torch>=2.11"')])
    assert run(monkeypatch, "doctor") == 1
    assert 'way out: pip install "torch>=2.11"' in capsys.readouterr().out
