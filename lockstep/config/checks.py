"""Rules between settings: one function each, its docstring the rule and its reason. ``check`` runs them all.

Those of the algorithm are in ``algorithm_checks.py``, of the gate in ``gate_checks.py``, of the rollout engine in
``engine_checks.py``, of its process and the transports in ``process_checks.py``, of devices and layouts in
``cluster_checks.py``, of variables in ``environment_checks.py``, of prepared checkpoints in ``prepare_checks.py``; here
are those of trainer, model, prompt and task.
"""

from __future__ import annotations

import string
from collections.abc import Iterator

import lockstep.config.cluster_checks
import lockstep.config.engine_checks
import lockstep.config.environment_checks
import lockstep.config.gate_checks
import lockstep.config.prepare_checks
import lockstep.config.process_checks  # noqa: F401  the rules of all of them join RULES
from lockstep.config.algorithm_checks import RULES, inert, rule
from lockstep.config.errors import Violation
from lockstep.config.schema import ArithmeticTask, FileTask, GgufModel, RunConfig

KNOWN_REWARDS = ("arithmetic", "reasoning_gym", "math_verify", "exact")


def check(config: RunConfig) -> list[Violation]:
    """Every violation of every rule; an empty list means that the settings agree."""
    return [violation for one in RULES for violation in one(config)]


# --- trainer and engine -----------------------------------------------------------------------------------------------


@rule
def schedule_fits_the_run(config: RunConfig) -> Iterator[Violation]:
    """Warm-up and decay lie inside the run, in that order; a constant schedule does not decay."""
    t = config.trainer
    total = config.steps * config.algorithm.optimizer_steps_per_batch
    length = ("steps", "algorithm.optimizer_steps_per_batch")
    for name in ("warmup_steps", "decay_start_step"):
        if getattr(t, name) >= total:
            yield Violation(
                f"trainer.{name}",
                f"lies at or after the end of a run of {total} optimizer steps",
                f"use less than {total}, or more steps",
                length,
            )
    if t.schedule == "constant":
        because = "with a constant schedule"
        yield from inert(t, "trainer", "decay_start_step final_ratio", because, ("trainer.schedule",))
    elif 0 < t.decay_start_step < t.warmup_steps:
        message = f"the decay would begin inside the warm-up of {t.warmup_steps} steps"
        yield Violation("trainer.decay_start_step", message, f"use {t.warmup_steps} or more", ("trainer.warmup_steps",))


@rule
def masters_are_not_coarser(config: RunConfig) -> Iterator[Violation]:
    """Master weights in bfloat16 under a float32 forward would add nothing but rounding."""
    t = config.trainer
    if t.dtype == "float32" and t.master_dtype == "bfloat16":
        yield Violation(
            "trainer.master_dtype",
            "bfloat16 masters are coarser than the float32 weights",
            'set trainer.master_dtype = "float32"',
            ("trainer.dtype",),
        )


@rule
def a_budget_of_tokens_has_a_choice(config: RunConfig) -> Iterator[Violation]:
    """A micro-batch of one sequence has that sequence's tokens, whatever the budget. Megatron's arguments say both."""
    t = config.trainer
    if t.packing == "single" and t.backend == "fsdp":
        yield from inert(t, "trainer", "micro_batch_tokens", "with packing single", ("trainer.packing",))


@rule
def replayed_routes_are_recorded(config: RunConfig) -> Iterator[Violation]:
    """Routing replay runs the experts that came with the rollout, so the engine has to record them."""
    if config.trainer.routing_replay and not config.rollout.record_routes:
        yield Violation(
            "trainer.routing_replay",
            "replays expert ids that the engine does not record",
            "set rollout.record_routes = true",
            ("rollout.record_routes",),
        )


@rule
def shared_weights_have_one_dtype(config: RunConfig) -> Iterator[Violation]:
    """The shared transport aliases the trainer's live weights, so both sides have their dtype."""
    if config.refit.transport == "shared" and config.rollout.dtype != config.trainer.dtype:
        message = f"an engine in {config.rollout.dtype} can't alias weights in {config.trainer.dtype}"
        way_out = f'set rollout.dtype = "{config.trainer.dtype}"'
        if config.trainer.dtype == "float32":  # the other way round no transport will do
            way_out += ', or refit.transport = "local"'
        yield Violation("refit.transport", message, way_out, ("rollout.dtype", "trainer.dtype"))


@rule
def the_torch_engine_is_not_finer(config: RunConfig) -> Iterator[Violation]:
    """Its refits refuse bfloat16 values for a float32 tensor: where one is declared float32, as a router's bias, they
    have been rounded on the way."""
    if config.rollout.engine != "torch" or config.refit.transport == "shared":
        return
    if (config.trainer.dtype, config.rollout.dtype) == ("bfloat16", "float32"):
        message = "its refits would be refused: the torch engine takes no bfloat16 values into float32 tensors"
        way_out = 'set rollout.dtype = "bfloat16", or trainer.dtype = "float32"'
        yield Violation("rollout.dtype", message, way_out, ("trainer.dtype",))


@rule
def quantised_weights_are_copies(config: RunConfig) -> Iterator[Violation]:
    """Quantised weights are other tensors than the trainer's, so there is nothing to alias. vLLM loads mxfp4 experts of
    GPT-OSS, which the fsdp trainer can't send, and of DeepSeek-V4, into which no refit was shown."""
    scheme = config.rollout.quantisation
    if scheme == "none":
        return
    if config.refit.transport == "shared":
        message = f"an engine quantised {scheme} can't alias the trainer's weights"
        way_out = 'set refit.transport = "local", or rollout.quantisation = "none"'
        yield Violation("refit.transport", message, way_out, ("rollout.quantisation",))
    if config.rollout.engine == "vllm" and config.trainer.backend == "fsdp" and scheme == "mxfp4_experts":
        message = "vLLM loads mxfp4 experts of GPT-OSS and DeepSeek-V4 alone, into which no refit of them was shown"
        way_out = 'set rollout.quantisation = "fp8" or "fp8_ue8m0", or rollout.engine = "torch"'
        yield Violation("rollout.quantisation", message, way_out, ("rollout.engine",))


@rule
def supervised_settings_need_steps(config: RunConfig) -> Iterator[Violation]:
    """Settings of the supervised warm-up do nothing with 0 steps of it."""
    if config.supervised.steps == 0:
        yield from inert(
            config.supervised,
            "supervised",
            "batch_size learning_rate",
            "with 0 supervised steps",
            ("supervised.steps",),
        )


# --- model, prompt, task ----------------------------------------------------------------------------------------------


@rule
def gguf_has_one_source(config: RunConfig) -> Iterator[Violation]:
    """A GGUF model is either a file or shipped by a package; both or neither leaves open which weights are meant."""
    for name, model in (("model", config.model), ("reference", config.reference), ("teacher", config.teacher)):
        if isinstance(model, GgufModel) and (model.path is None) == (model.package is None):
            how = "neither path nor package is" if model.path is None else "path and package are both"
            yield Violation(
                f"{name}.path", f"{how} set", f"set exactly one of {name}.path and {name}.package", (f"{name}.package",)
            )


@rule
def raw_prompts_have_no_chat_settings(config: RunConfig) -> Iterator[Violation]:
    """System message and thinking switch are arguments of the chat template, which a raw prompt does not use. A given
    system message also leaves nothing for the template's own."""
    p = config.prompt
    if p.format == "raw":
        names = "system thinking template_default_system"
        yield from inert(p, "prompt", names, "with format raw", ("prompt.format",))
    elif p.system is not None:
        yield from inert(p, "prompt", "template_default_system", "when a system message is given", ("prompt.system",))


def metric_word(name: str) -> str:
    """A reward's name as a part of a metric's name."""
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in name.lower()).strip("_") or "unnamed"


@rule
def rewards_have_metrics_of_their_own(config: RunConfig) -> Iterator[Violation]:
    """A metric's name has letters, digits and underscores: of two rewards that differ elsewhere, one would be lost."""
    first: dict[str, str] = {}
    for name in dict.fromkeys(reward.name for reward in config.task.rewards):
        word = metric_word(name)
        if word in first:
            message = f'"{first[word]}" and "{name}" would both be the metric part_{word}'
            yield Violation("task.rewards", message, "rename one of the two functions or its module")
        first.setdefault(word, name)


@rule
def rewards_are_known(config: RunConfig) -> Iterator[Violation]:
    """A task has at least one reward, each a built-in name or ``package.module:function``, none of them twice."""
    names = [reward.name for reward in config.task.rewards]
    if not names:
        yield Violation("task.rewards", "is empty: nothing would be scored", 'add { name = "exact" } or another')
    if len(set(names)) < len(names):
        yield Violation("task.rewards", "names a reward twice", "name each once and add up the weights")
    for name in names:
        module, colon, function = name.partition(":")
        is_import = bool(colon) and all(part.isidentifier() for part in [*module.split("."), function])
        if name not in KNOWN_REWARDS and not is_import:
            yield Violation(
                "task.rewards",
                f'"{name}" is no reward',
                "use a built-in name or package.module:function",
                allowed=", ".join(KNOWN_REWARDS) + " or package.module:function",
            )


@rule
def reward_weights_count(config: RunConfig) -> Iterator[Violation]:
    """A reward of weight 0 is scored and teaches nothing."""
    for reward in config.task.rewards:
        if reward.weight == 0:
            yield Violation(
                "task.rewards",
                f'"{reward.name}" has weight 0: nothing could be learned from it',
                "remove the reward, or give it a weight other than 0",
            )


@rule
def arithmetic_has_problems(config: RunConfig) -> Iterator[Violation]:
    """Operands and operations make more problems than are held out, operations are named once, and the template shows
    what is asked."""
    task = config.task
    if not isinstance(task, ArithmeticTask):
        return
    num_problems = len(set(task.operations)) * max(0, task.max_operand - task.min_operand + 1) ** 2
    if task.min_operand > task.max_operand:
        yield Violation(
            "task.min_operand",
            f"is above max_operand ({task.max_operand}): there is no problem",
            f"use {task.max_operand} or less",
            ("task.max_operand",),
        )
    elif task.operations and task.num_heldout >= num_problems:
        yield Violation(
            "task.num_heldout",
            f"leaves nothing to train on: there are {num_problems} problems",
            f"use less than {num_problems}, or a wider range",
            ("task.min_operand", "task.max_operand", "task.operations"),
        )
    if not task.operations or len(set(task.operations)) < len(task.operations):
        yield Violation("task.operations", "is empty or names an operation twice", "name each operation once")
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(task.template) if name is not None}
    except ValueError:
        fields = {"?"}
    needed = {"a", "b", "op"} if len(task.operations) > 1 else {"a", "b"}
    if not needed <= fields <= {"a", "b", "op"}:
        yield Violation(
            "task.template",
            f"must have the fields {', '.join(sorted(needed))} and no unknown one",
            'for example "What is {a} {op} {b}?"',
            ("task.operations",),
        )


@rule
def stop_bonus_needs_its_reward(config: RunConfig) -> Iterator[Violation]:
    """The stop bonus is part of the arithmetic reward. One of 0 is off, whatever the rewards are."""
    task = config.task
    if not isinstance(task, ArithmeticTask) or task.stop_bonus == 0:
        return
    if all(reward.name != "arithmetic" for reward in task.rewards):
        yield from inert(task, "task", "stop_bonus", "without the arithmetic reward", ("task.rewards",))


@rule
def file_task_is_consistent(config: RunConfig) -> Iterator[Violation]:
    """Held-out rows come from one place, and rewards that compare with a reference answer have one."""
    task = config.task
    if not isinstance(task, FileTask):
        return
    if task.heldout_path is not None:
        yield from inert(task, "task", "num_heldout", "when heldout_path is given", ("task.heldout_path",))
    if task.answer_key is None:
        for name in {r.name for r in task.rewards} & set(KNOWN_REWARDS):
            yield Violation(
                "task.answer_key",
                f"reward {name} compares with a reference answer and there is none",
                "name the column of the answers",
                ("task.rewards",),
            )


@rule
def evaluation_fits_the_heldout_problems(config: RunConfig) -> Iterator[Violation]:
    """No more problems are evaluated than are held out, or some would count twice. With a file of held-out problems
    the number is known only when it is read."""
    task = config.task
    if isinstance(task, FileTask) and task.heldout_path is not None:
        return
    if config.eval.num_problems > task.num_heldout:
        yield Violation(
            "eval.num_problems",
            f"is more than the {task.num_heldout} problems held out",
            f"use {task.num_heldout} or less, or hold out more",
            ("task.num_heldout",),
        )
