"""TRL's side of the end-to-end comparison: GRPOTrainer of trl 1.16 with the same model, prompts, reward and update.

The reward is Lockstep's own task; the prompts are the texts that Lockstep renders, and the token ids are checked to be
the same. TRL has no bfloat16 weights with float32 masters: ``weights`` chooses between bfloat16 without masters (the
fastest) and float32 under bfloat16 autocast (its default on hardware that has it).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from benchmarks.stepwise import BenchmarkError, StepGate
from benchmarks.workload import Workload


@dataclass(frozen=True, slots=True)
class TrlSettings:
    """What may differ between TRL's ways of doing the same work. The defaults are the fastest found (NOTES.md)."""

    micro_batch: int = 16
    weights: Literal["bfloat16", "autocast"] = "bfloat16"
    attention: Literal["sdpa", "eager"] = "eager"
    continuous_batching: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of GRPOConfig."""


def run(work: Workload, settings: TrlSettings) -> None:
    """Run steps until the parent has enough."""
    gate = StepGate()
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import GRPOTrainer  # pyright: ignore[reportMissingImports]

    from lockstep.driver.assembly import stop_token_ids
    from lockstep.model.load import load_model, load_tokenizer, torch_dtype
    from lockstep.tasks.build import build_task

    torch.set_num_threads(work.threads)
    config = work.resolved().config
    torch.manual_seed(config.seed)
    task, tokenizer = build_task(config.task), load_tokenizer(config.model)
    model: Any = load_model(config.model, torch_dtype("float32" if settings.weights == "autocast" else "bfloat16"))
    model.set_attn_implementation(settings.attention)
    stops = stop_token_ids(tokenizer, model)
    uniform = work.lengths == "uniform"
    if uniform:
        model.generation_config.eos_token_id = None
    rows = _rows(work, task, tokenizer, config.prompt)
    step: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=_reward(task, frozenset() if uniform else stops, step),
            args=_arguments(work, settings, directory, uniform=uniform),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[_hold(gate, work, settings, rows, step)],
        )
        if uniform:
            trainer.eos_token_ids = [-1]
        _time_generation(model, step)
        trainer.train()


def _reward(task: Any, stops: Collection[int], step: dict[str, Any]) -> Callable[..., list[float]]:
    """Lockstep's task as TRL's reward; what it saw of the batch is left in ``step``."""

    def reward(completions: list[str], completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        problems = [task.problem("train", i) for i in index]
        scores = [
            score.reward for score in task.score(problems, completions, [ids[-1] in stops for ids in completion_ids])
        ]
        step.update(
            problem_ids=list(dict.fromkeys(problem.problem_id for problem in problems)),
            completion_tokens=[len(ids) for ids in completion_ids],
            rewards=scores,
        )
        return [0.0 if score is None else score for score in scores]

    return reward


def _hold(
    gate: StepGate, work: Workload, settings: TrlSettings, rows: list[dict[str, Any]], step: dict[str, Any]
) -> Any:
    """A callback that reports each optimizer step to the gate, and stands there until the next one is wanted."""
    from transformers import TrainerCallback

    class Hold(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            first = (state.global_step - 1) * work.num_prompts
            gate.finish(
                **step,
                prompt_tokens=[
                    row["num_tokens"] for row in rows[first : first + work.num_prompts] for _ in range(work.group_size)
                ],
                num_updates=state.global_step,
            )

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            gate.wait(settings=asdict(settings))

    return Hold()


def _time_generation(model: Any, step: dict[str, Any]) -> None:
    """Keep the seconds of the last ``model.generate`` in ``step``."""
    generate = model.generate

    def timed(*arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        result = generate(*arguments, **named)
        step["generate_s"] = time.perf_counter() - begin
        return result

    model.generate = timed


def _rows(work: Workload, task: Any, tokenizer: Any, prompt_config: Any) -> list[dict[str, Any]]:
    """Prompts in Lockstep's order. Raises BenchmarkError where TRL's way of tokenizing would give other ids."""
    from lockstep.tasks.prompt import PromptRenderer

    renderer = PromptRenderer(tokenizer, prompt_config)
    rows = []
    for index in range((work.num_steps + 1) * work.num_prompts):
        rendered = renderer.render(task.problem("train", index))
        if rendered is None:
            raise BenchmarkError(f"training problem {index} was skipped")
        if tokenizer(text=[rendered.text])["input_ids"][0] != rendered.tokens.tolist():
            raise BenchmarkError(f"training problem {index} has other token ids in TRL: {rendered.text!r}")
        rows.append({"prompt": rendered.text, "index": index, "num_tokens": len(rendered.tokens)})
    return rows


def _arguments(work: Workload, settings: TrlSettings, directory: str, *, uniform: bool) -> Any:
    from trl import GRPOConfig  # pyright: ignore[reportMissingImports]

    return GRPOConfig(
        output_dir=directory,
        use_cpu=True,
        bf16=settings.weights == "autocast",
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=work.num_completions // settings.micro_batch,
        num_generations=work.group_size,
        max_completion_length=work.max_new_tokens,
        max_steps=work.num_steps + 1,
        shuffle_dataset=False,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",  # the mean over the batch's tokens, as Lockstep's token_mean
        scale_rewards="group",
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        generation_kwargs={"eos_token_id": None} if uniform else None,
        use_transformers_continuous_batching=settings.continuous_batching,
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings.extra,
    )


def main() -> None:
    """The child process that ``end_to_end`` starts."""
    from benchmarks.lockstep_side import add_workload_arguments

    parser = argparse.ArgumentParser(description="One side of benchmarks.end_to_end; not to be run by hand.")
    add_workload_arguments(parser)
    parser.add_argument("--settings", type=json.loads, default={}, help="Fields of TrlSettings as JSON.")
    arguments = parser.parse_args()
    run(Workload(arguments.lengths, arguments.steps, arguments.threads), TrlSettings(**arguments.settings))


if __name__ == "__main__":
    main()
