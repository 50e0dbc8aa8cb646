"""Data and settings that a run can't use are refused before its first step, in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.loop import train
from lockstep.recipes import load_recipe
from lockstep.tasks.errors import TaskError
from tests.e2e.conftest import SMALL, run

pytestmark = pytest.mark.slow

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(9) for b in range(9)]
LONG = {"prompt": "1" * 200 + "=", "answer": "1"}


def file_task(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f'task={{kind="file", path="{path}", num_heldout=8, rewards=[{{name="exact"}}]}}'


def test_a_prompt_too_long_that_comes_late_is_refused_before_the_first_step(tmp_path: Path) -> None:
    task = file_task(tmp_path / "rows.jsonl", [*ROWS, LONG])
    code, _, err = run(tmp_path / "run", [*SMALL, "steps=200", task])
    assert code == 2
    assert "1 of 78 prompts can't be asked" in err
    assert "rows.jsonl/line-82: its prompt has 202 tokens" in err
    assert "supervised:" not in err, "nothing has been trained yet"


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        (LONG, ['prompt.overlong="skip"'], "would be skipped, which supervised steps don't do"),
        ({"prompt": "9+9=", "answer": "18\u00e9"}, [], "the tokenizer refuses its reference answer"),
    ],
)
def test_what_supervised_steps_cannot_train_on_is_named(
    tmp_path: Path, row: dict[str, str], settings: list[str], words: str
) -> None:
    task = file_task(tmp_path / "rows.jsonl", [*ROWS, row])
    with pytest.raises(TaskError, match=rf"rows\.jsonl/line-82: .*{words}"):
        train(load_recipe("tiny-qwen3-moe", [*SMALL, "supervised.batch_size=100", task, *settings]), tmp_path / "run")


def test_a_gradient_that_is_not_finite_is_told_without_a_traceback(tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "run", [*SMALL, "supervised.learning_rate=1e30"])
    assert code == 1
    assert "gradient norm is nan; the step is refused and no weight changed" in err
    assert "Traceback" not in err


def test_a_layout_that_is_not_exact_for_the_architecture_is_refused_without_a_traceback(tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "run", ["steps=1", 'trainer.packing="packed"'], recipe="tiny-deepseek-v4")
    assert code == 2
    assert "is not exact for deepseek_v4" in err
    assert "exact layouts: single, padded, or 'auto'" in err
    assert "Traceback" not in err
