"""The examples of docs/write-a-task.md do what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from lockstep.config.schema import FileTask, ReasoningGymTask
from lockstep.tasks.build import build_task, prove_gold

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "docs" / "write-a-task.md").read_text(), re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def test_the_pages_own_task_prints_what_the_page_shows(tmp_path):
    _, script = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert done.stdout == blocks("")[0]


def test_the_pages_data_file_and_rewards_make_a_task_whose_gold_is_proved(tmp_path, monkeypatch):
    rewards, _ = blocks("python")
    (tmp_path / "my_rewards.py").write_text(rewards)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    data = tmp_path / "problems.jsonl"
    data.write_text(blocks("json")[0] + '{"prompt": "2+2?", "answer": 4}\n')
    _, file_text, rewards_text = blocks("toml")
    for text in (file_text, file_text.partition("[[task.rewards]]")[0] + rewards_text):
        section = tomllib.loads(text)["task"]
        section |= {"path": str(data), "num_heldout": 1, "rewards": tuple(section["rewards"])}
        task = build_task(FileTask.model_validate(section))
        try:
            assert prove_gold(task).num_proved == 3
        finally:
            task.close()


def test_the_pages_reasoning_gym_section_is_a_valid_configuration():
    assert ReasoningGymTask.model_validate(tomllib.loads(blocks("toml")[0])["task"]).dataset == "chain_sum"
