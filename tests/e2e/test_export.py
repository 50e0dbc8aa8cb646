"""``lockstep export`` of a run of each architecture: transformers loads the trainer's weights, bit for bit."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.headers import read_checkpoint
from lockstep.config.load import load_run_config
from lockstep.driver.folder import TRAINER, no_recipe
from lockstep.metrics.checkpoints import Checkpoints
from lockstep.metrics.run_folder import CONFIG
from lockstep.model.load import load_model
from lockstep.model.tiny import tiny_names, tiny_source
from lockstep.model.weights import ModelWeights
from lockstep.train.fsdp import FsdpTrainer
from tests.e2e.conftest import command, run

RECIPE = """
name = "{name}"
steps = 1
threads = 1
[model]
source = "random"
model_type = "{model_type}"
[model.config]
{config}
[prompt]
format = "raw"
[task]
kind = "arithmetic"
min_operand = 0
max_operand = 9
num_heldout = 4
template = "{{a}}{{op}}{{b}}="
stop_bonus = 0.0
[rollout]
max_new_tokens = 4
num_slots = 16
dtype = "float32"
[algorithm]
num_prompts = 4
group_size = 4
[supervised]
steps = 2
batch_size = 8
learning_rate = 3e-3
[trainer]
learning_rate = 1e-3
dtype = "float32"
[eval]
num_problems = 4
[checkpoint]
every = 1
[gate]
action = "warn"
[[gate.bounds]]
metric = "abs_diff/mean"
bound = 0.1
evidence = "none: agreement is judged elsewhere"
"""


def toml_value(value: Any) -> str:
    """JSON is TOML for numbers, texts, booleans and lists; a mapping becomes an inline table."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def trained_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """The trainer's weights after the last step, from its checkpoint."""
    config = load_run_config(str(run_dir / CONFIG), find_recipe=no_recipe).config
    latest = Checkpoints(run_dir / "checkpoints").latest()
    assert latest is not None
    trainer = FsdpTrainer(
        load_model(config.model, torch.float32), config.trainer, total_optimizer_steps=1, temperature=1.0
    )
    fresh = {name: tensor.clone() for name, _, _, tensor in trainer.weights().shards()}
    trainer.load(latest[1] / TRAINER)
    weights = {name: tensor.detach().clone() for name, _, _, tensor in trainer.weights().shards()}
    assert any(not torch.equal(weights[name], fresh[name]) for name in weights), "it was trained"
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny_names())
def test_transformers_loads_the_export_of_a_run_bit_for_bit(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = tiny_source(name)
    assert source is not None
    recipe, run_dir, out = tmp_path / "recipe.toml", tmp_path / "run", tmp_path / "out" / "model"
    lines = "\n".join(f"{key} = {toml_value(value)}" for key, value in source.config.items())
    recipe.write_text(RECIPE.format(name=name, model_type=source.model_type, config=lines))
    code, _, err = run(run_dir, (), recipe=str(recipe))
    assert code == 0, err
    done = subprocess.run(
        command("export", str(run_dir), str(out)), capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out)
    assert read_checkpoint(out).tensors
    theirs: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    loaded = {key: tensor for key, _, _, tensor in ModelWeights(theirs, 0).shards()}
    mine = trained_weights(run_dir)
    assert loaded.keys() == mine.keys()
    for key, tensor in mine.items():
        assert torch.equal(loaded[key], tensor), key
    again = subprocess.run(command("export", str(run_dir), str(out)), capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "not an empty folder" in " ".join(again.stderr.replace("│", " ").split())
