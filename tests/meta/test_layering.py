"""Imports point one way, and the light parts stay light."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "numpy", "pyarrow", "plotly", "pydantic")


def test_imports_point_one_way() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = ("Imports point one way KEPT", "Lanes can be used alone KEPT", " 0 broken")
    assert [text for text in kept if text not in done.stdout] == []


def test_the_contract_of_lanes_names_every_other_part_of_the_package() -> None:
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (forbidden,) = [contract["forbidden_modules"] for contract in contracts if contract["id"] == "lanes"]
    parts = {path.stem for path in (REPOSITORY / "lockstep").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert set(forbidden) == {f"lockstep.{part}" for part in parts - {"__init__", "__main__", "__pycache__", "lanes"}}


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after ``statement``."""
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}}, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("module", ["lockstep", "lockstep.cli"])
def test_starting_imports_nothing_heavy(module: str) -> None:
    assert not modules_after(f"import {module}") & set(HEAVY)


@pytest.mark.parametrize(
    "module",
    [
        "lockstep.records",
        "lockstep.interfaces",
        "lockstep.config.load",
        "lockstep.recipes",
        "lockstep.hardware.profile",
    ],
)
def test_configuration_and_records_do_without_torch(module: str) -> None:
    assert not modules_after(f"import {module}") & {"torch", "transformers"}


def test_loading_every_recipe_does_without_torch() -> None:
    statement = "from lockstep.recipes import *\nfor name in recipe_names(): find_recipe(name)"
    assert not modules_after(statement) & {"torch", "transformers"}


def test_help_does_without_torch_and_takes_half_a_second() -> None:
    code = "import sys; sys.argv = ['lockstep', '--help']; from lockstep.cli import main\n"
    code += "try: main()\nexcept SystemExit: print('torch' in sys.modules, file=sys.stderr)"
    seconds: list[float] = []
    for _ in range(3):
        before = os.times()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        after = os.times()
        # Processor time, not wall time: other work on the machine must not fail this.
        seconds.append(sum(after[2:4]) - sum(before[2:4]))
        assert "train" in done.stdout
        assert done.stderr.strip() == "False"
    assert 0 < min(seconds) < 0.5, seconds
