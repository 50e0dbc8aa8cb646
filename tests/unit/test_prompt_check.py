"""Prompts are rendered before a run begins: what would be refused in the middle of it is refused at once."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config.schema import PromptConfig, RunConfig
from lockstep.driver.assembly import num_asked
from lockstep.model.characters import CharacterTokenizer
from lockstep.recipes import load_recipe
from lockstep.records import Problem
from lockstep.tasks.errors import TaskError
from lockstep.tasks.listed import ListedTask
from lockstep.tasks.prompt import PromptRenderer
from lockstep.tasks.prompt_check import check_prompts


def task_of(train: list[str], heldout: list[str] | None = None) -> ListedTask:
    def problems(name: str, prompts: list[str]) -> list[Problem]:
        return [Problem(f"{name}-{i}", prompt, "1") for i, prompt in enumerate(prompts)]

    rewards: Any = None  # nothing is scored here
    return ListedTask("t", problems("train", train), problems("heldout", heldout or ["1+1="]), rewards, 0)


def renderer_of(overlong: str = "refuse") -> PromptRenderer:
    config = PromptConfig.model_validate({"format": "raw", "max_tokens": 5, "overlong": overlong})
    return PromptRenderer(CharacterTokenizer(), config)


def test_each_prompt_that_would_be_refused_is_named_before_the_run_begins() -> None:
    task = task_of(["1+2=", "1234567", "é", "2+2="], ["3+3=", "7654321"])
    with pytest.raises(TaskError) as refusal:
        check_prompts(task, renderer_of(), num_train=100, num_heldout=2)
    text = str(refusal.value)
    assert "3 of 6 prompts can't be asked" in text
    assert "train-1: its prompt has 8 tokens, prompt.max_tokens is 5" in text
    assert "train-2: the tokenizer refuses its text" in text
    assert "heldout-1: its prompt has 8 tokens" in text


def test_prompts_that_the_run_will_not_ask_are_not_looked_at() -> None:
    task = task_of([f"{i}+1=" for i in range(8)] + ["1234567"], ["3+3=", "7654321"])
    position = next(i for i in range(9) if task.problem("train", i).prompt == "1234567")
    assert check_prompts(task, renderer_of(), num_train=position, num_heldout=1) is None
    with pytest.raises(TaskError, match="1 of "):
        check_prompts(task, renderer_of(), num_train=position + 1, num_heldout=1)


@pytest.mark.parametrize(("overlong", "word"), [("skip", "1 will be skipped"), ("truncate_left", "1 will be cut")])
def test_prompts_that_will_be_skipped_or_cut_are_told_and_not_counted_yet(overlong: str, word: str) -> None:
    renderer = renderer_of(overlong)
    told = check_prompts(task_of(["1+2=", "1234567"]), renderer, num_train=2, num_heldout=1)
    assert told is not None
    assert f"of 3 prompts, {word}" in told
    assert (renderer.num_skipped, renderer.num_truncated) == (0, 0)


@pytest.mark.parametrize(("suffix", "fits"), [("", True), ("=>", False)])
def test_the_limit_is_on_the_whole_rendered_prompt(suffix: str, fits: bool) -> None:
    """verl-project/verl#2069: a filter that leaves out a part of what is asked fails in the middle of training."""
    config = PromptConfig.model_validate({"format": "raw", "max_tokens": 5, "suffix": suffix})
    renderer = PromptRenderer(CharacterTokenizer(), config)
    task = task_of(["1+2="])
    if fits:
        assert check_prompts(task, renderer, num_train=1, num_heldout=1) is None
        rendered = renderer.render(task.problem("train", 0))
        assert rendered is not None
        assert len(rendered.tokens) == 5, "the beginning of the sequence counts too"
    else:
        with pytest.raises(TaskError, match="its prompt has 7 tokens"):
            check_prompts(task, renderer, num_train=1, num_heldout=1)


def test_a_split_that_would_be_skipped_whole_is_refused() -> None:
    with pytest.raises(TaskError, match=r"all 2 train prompts .* would be skipped"):
        check_prompts(task_of(["1234567", "7654321"]), renderer_of("skip"), num_train=9, num_heldout=1)
    with pytest.raises(TaskError, match="all 1 heldout prompts"):
        check_prompts(task_of(["1+2="], ["7654321"]), renderer_of("skip"), num_train=9, num_heldout=1)


def test_refills_and_supervised_steps_ask_more_prompts() -> None:
    def asked(*settings: str) -> int:
        base = ["steps=10", "algorithm.num_prompts=4", "supervised.steps=2", "supervised.batch_size=8"]
        config: RunConfig = load_recipe("tiny-qwen3-moe", [*base, *settings]).config
        return num_asked(config)

    assert asked() == 40
    assert asked("algorithm.dynamic_sampling.enabled=true") == 200
    assert asked("supervised.batch_size=64") == 128
