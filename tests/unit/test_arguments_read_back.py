"""The arguments that a recipe means, read back as a launch command, are the recipe's job: nothing is lost or inert."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.schema import RunConfig
from lockstep.driver.arguments import Argument, effective
from lockstep.driver.jobs import job_of
from lockstep.driver.launch_commands import LaunchVerdict, plan_launch
from lockstep.recipes import load_recipe, recipe_names
from lockstep.recipes.overlays import Overlay, overlays_of
from lockstep.topology.pipeline import split_layers
from lockstep.topology.records import Job

OVERLAYS = [one for name in recipe_names() for one in overlays_of(name)]
IDS = [f"{one.recipe} {one.hardware} {one.nodes or ''}".strip() for one in OVERLAYS]
SPLIT = ("stage_layers", "first_stage_layers", "last_stage_layers", "switches")
NOT_SAID = {
    "batch": ("global_batch", "logprob_chunk_tokens", "score_tokens_per_gpu"),
    "memory": ("offload_optimizer",),
    "train": SPLIT,
    "engine": (),
}
"""Fields that a command says in another way (steps instead of samples a step, a layout string), or that the program
takes from another setting."""


def config_of(one: Overlay) -> RunConfig:
    return load_recipe(one.recipe, hardware=one.hardware, nodes=one.nodes).config


def words(arguments: tuple[Argument, ...], *programs: str) -> list[str]:
    return [argument.text for argument in arguments if argument.program in programs]


def command(config: RunConfig) -> str:
    """The launch command of miles or verl, whose engine's arguments are miles' own with a prefix."""
    found = effective(config).arguments
    variables = {**config.environment.trainer, **config.environment.engine}
    start = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    if config.trainer.megatron.implementation == "verl":
        return " ".join([*start, "python3 -m verl.trainer.main_ppo", *words(found, "verl")])
    engine = [
        " ".join(f"--sglang-{word[2:]}" if word.startswith("--") else word for word in text.split())
        for text in words(found, "sglang")
        if not text.startswith("--tp-size ")  # miles sets it to the engine's devices
    ]
    return " ".join([*start, "python3 train.py", *words(found, "megatron", "miles"), *engine])


def read_back(text: str, one: Overlay, tmp_path: Path) -> LaunchVerdict:
    script = tmp_path / "run.sh"
    script.write_text(text + "\n")
    (verdict,) = plan_launch(script, hardware=one.hardware).verdicts
    return verdict


def said(job: Job, part: str) -> dict[str, Any]:
    fields = asdict(getattr(job, part))
    return {name: value for name, value in fields.items() if name not in NOT_SAID[part]}


@pytest.mark.parametrize("one", OVERLAYS, ids=IDS)
def test_the_arguments_of_a_recipe_are_its_job(one: Overlay, tmp_path: Path) -> None:
    """``--max-tokens-per-gpu`` without dynamic batches had no effect, contiguous context parallelism had no argument,
    and verl got 256 prompts a step for 8."""
    config = config_of(one)
    verdict = read_back(command(config), one, tmp_path)
    mine, theirs = job_of(config), verdict.launch.job
    assert theirs is not None
    assert mine.batch is not None
    if not mine.batch.packing:  # a budget of padded rows is printed as public scripts have it, and has no effect
        mine = replace(mine, batch=replace(mine.batch, max_tokens_per_gpu=None))
    for part in NOT_SAID:
        assert said(theirs, part) == said(mine, part), part
    assert mine.train is not None
    assert theirs.train is not None
    assert split_layers(mine.model.num_layers, mine.train) == split_layers(mine.model.num_layers, theirs.train)
    devices = ("nodes", "gpus_per_node", "colocated", "routing_replay", "indexer_replay", "refit_bucket_bytes")
    assert [getattr(theirs, name) for name in devices] == [getattr(mine, name) for name in devices]


@pytest.mark.parametrize("one", OVERLAYS, ids=IDS)
def test_the_arguments_of_a_recipe_are_legal_and_none_is_inert(one: Overlay, tmp_path: Path) -> None:
    config = config_of(one)
    verdict = read_back(command(config), one, tmp_path)
    complaints = [finding for finding in verdict.findings if finding.severity != "note"]
    padded = [f for f in complaints if f.rule == "flag-inert" and "--max-tokens-per-gpu" in f.message]
    assert [f for f in complaints if f not in padded and f.rule not in ("memory-fits", "variable-history")] == []
    assert len(padded) == (config.trainer.packing == "padded")
    assert verdict.legal


@pytest.mark.parametrize(
    ("nodes", "gpus_per_node", "rollout"), [(1, 8, 4), (2, 8, 4), (4, 8, 16), (3, 8, 8), (2, 4, 6), (6, 8, 40)]
)
@pytest.mark.parametrize(("recipe", "hardware"), [("qwen3-30b-a3b", "h200"), ("deepseek-v4-flash", "h100")])
def test_a_trainer_beside_engines_has_the_devices_that_they_leave(
    recipe: str, hardware: str, nodes: int, gpus_per_node: int, rollout: int, tmp_path: Path
) -> None:
    """On one node the trainer was given all of its devices, engines' included; verl's trainer was given their nodes."""
    sizes = [f"cluster.gpus_per_node={gpus_per_node}", f"cluster.rollout_gpus={rollout}", "rollout.layout.dp=1"]
    sizes += ["cluster.colocated=false", "rollout.layout.tp=1", "rollout.layout.gpus_per_engine=1"]
    one = next(one for one in OVERLAYS if (one.recipe, one.hardware) == (recipe, hardware))
    config = load_recipe(recipe, [*sizes, "rollout.layout.ep=1"], hardware=hardware, nodes=nodes).config
    verdict = read_back(command(config), one, tmp_path)
    assert verdict.launch.job is not None
    assert verdict.launch.job.train_world == nodes * gpus_per_node - rollout
    if config.trainer.megatron.implementation == "miles":
        assert verdict.launch.job.rollout_gpus == rollout


def test_the_arguments_of_vllms_server_are_the_recipes_engine(tmp_path: Path) -> None:
    one = next(one for one in OVERLAYS if (one.recipe, one.hardware) == ("deepseek-v4-flash", "h100"))
    config = config_of(one)
    text = " ".join(["vllm serve deepseek-ai/DeepSeek-V4-Flash", *words(effective(config).arguments, "vllm")])
    job = read_back(text, one, tmp_path).launch.job
    assert job is not None
    assert job.engine == job_of(config).engine
