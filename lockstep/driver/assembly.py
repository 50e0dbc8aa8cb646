"""Building the parts of a run from its configuration: who owns what, in the order in which memory is taken.

model source ──▶ trainer's module ──copy──▶ engine's own module
                      │                         ▲
                      └──── weights() ── refit ──┘
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from lockstep.config.gate_checks import bounds_for, fitting_bounds
from lockstep.config.process_checks import chosen_transport
from lockstep.config.schema import AlgorithmConfig, BoundConfig, GgufModel, ModelSource, PromptConfig, RunConfig
from lockstep.driver.engines import build_engine, close_engine, context_of, served_length
from lockstep.driver.groups import GroupSampler
from lockstep.driver.proof import RefitProof
from lockstep.driver.runnable import refuse_to_run
from lockstep.driver.supervised import run_supervised
from lockstep.hardware.allocator import bound_primitive_cache
from lockstep.hardware.profile import choose, detect
from lockstep.interfaces import Engine, Objective, Scorer, Task
from lockstep.model.adapter import routers
from lockstep.model.fitness import refuse_undecodable, refuse_unfit
from lockstep.model.gguf_files import parsed_once
from lockstep.model.load import ModelError, load_model, load_tokenizer, other_token, torch_dtype
from lockstep.parity.gate import Gate
from lockstep.refit.transports import Transport, make_transport
from lockstep.spans import span
from lockstep.tasks.build import build_task, prove_gold
from lockstep.tasks.prompt import PromptRenderer
from lockstep.tasks.prompt_check import check_prompts
from lockstep.train.fsdp import FsdpTrainer
from lockstep.train.objective import PolicyObjective
from lockstep.train.reference import ReferenceScorer

NUM_GOLD_PROOFS = 64


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that ``run_sync`` drives. ``decode``: text of tokens for a person, special ones by name;
    ``refit_steps``: steps at which this process refitted its engine."""

    config: RunConfig
    task: Task
    decode: Callable[[Sequence[int]], str]
    trainer: FsdpTrainer
    engine: Engine
    sampler: GroupSampler
    reference: Scorer | None
    teacher: Scorer | None
    transport: Transport
    gate: Gate
    proof: RefitProof
    refit_steps: list[int]

    @property
    def algorithm(self) -> AlgorithmConfig:
        """The algorithm in force: the configured one, unless the gate has switched its correction on."""
        return self.gate.algorithm(self.config.algorithm)

    @property
    def objective(self) -> Objective:
        """The loss of the algorithm in force."""
        return PolicyObjective(self.algorithm)


@contextmanager
def assembled(config: RunConfig, say: Callable[[str], None], *, warm_up: bool) -> Iterator[Parts]:
    """The parts of a run; worker processes and the event loop end with the block.

    ``warm_up`` False leaves the supervised steps out: a resumed run has them in its checkpoint. The task proves first
    that its own gold answers score full marks, since nothing else is worth starting otherwise.
    """
    refuse_to_run(config)
    chosen = {choice.setting: choice for choice in choose(detect(), config)}
    for choice in chosen.values():
        if choice.slow or choice.setting in ("device", "threads"):
            say(f"{choice.setting}: {choice.value} ({choice.reason})")
    bound_primitive_cache()
    torch.set_num_threads(int(chosen["threads"].value))
    device = str(chosen["device"].value)
    gate = Gate(config.gate, bounds_for(config, device))
    for bound in (bound for bound in gate.bounds if not bound.shown):
        say(f"bound {bound.bound:g} on {bound.metric} is not shown on this hardware; from: {bound.evidence}")
    task = build_task(config.task)
    try:
        with span("start/task"):
            say(str(prove_gold(task, num_problems=NUM_GOLD_PROOFS, say=say)))
        with span("start/load"), parsed_once() if isinstance(config.model, GgufModel) else nullcontext():
            tokenizer = load_tokenizer(config.model)
            model = _load(config.model, config, device)
            if config.rollout.engine == "torch":
                refuse_undecodable(model)
        if config.rollout.record_routes and not routers(model):
            raise ModelError(f"rollout.record_routes: {type(model).__name__} has no routers of experts; leave it out")
        with asyncio.Runner() as runner:
            parts = _connect(config, task, tokenizer, model, device, gate, runner, say, warm_up=warm_up)
            try:
                yield parts
            finally:
                close_engine(parts.engine)
                parts.transport.close()
    finally:
        task.close()


def _load(source: ModelSource, config: RunConfig, device: str) -> Any:
    """The model of ``source`` in the trainer's precision. Raises ModelError if it can't be loaded or is not causal."""
    model = load_model(source, torch_dtype(config.trainer.dtype), device, head_dtype=config.head_dtype)
    refuse_unfit(model)
    return model


def _connect(
    config: RunConfig,
    task: Task,
    tokenizer: Any,
    model: Any,
    device: str,
    gate: Gate,
    runner: asyncio.Runner,
    say: Callable[[str], None],
    *,
    warm_up: bool,
) -> Parts:
    stop_ids = stop_token_ids(tokenizer, model)
    if not stop_ids:
        say("no token ends a completion: neither tokenizer nor generation config names one")
    vocab_limit = min(len(tokenizer), model.get_input_embeddings().num_embeddings)
    renderer = _renderer(config, task, tokenizer, model, say)
    # The reference is the policy that reinforcement learning starts from: a resumed run makes it again.
    starts_from_here = config.algorithm.kl.place != "off" and config.reference is None
    if (warm_up or starts_from_here) and config.supervised.steps:
        with span("start/supervised"):
            say(run_supervised(config, model, task, renderer, tokenizer, vocab_limit))

    def completion_text(tokens: Sequence[int]) -> str:
        return tokenizer.decode(list(tokens), skip_special_tokens=True)

    def decode(tokens: Sequence[int]) -> str:  # a stop string may be a special token, and so may the worst token
        return tokenizer.decode(list(tokens), skip_special_tokens=False)

    scorers = partial(_scorer, config, device, tokenizer, vocab_limit, _longest(config, model, renderer), say)
    engine = build_engine(
        config, model, decode=decode, vocab_limit=vocab_limit, max_prompt_tokens=renderer.config.max_tokens
    )
    initial = copy.deepcopy(model) if starts_from_here else None
    trainer = _trainer(config, model, vocab_limit)
    return Parts(
        config=config,
        task=task,
        decode=decode,
        trainer=trainer,
        engine=engine,
        sampler=GroupSampler(
            engine,
            task,
            renderer,
            completion_text,
            config.rollout,
            config.algorithm,
            seed=config.seed,
            stop_token_ids=stop_ids,
            runner=runner,
        ),
        reference=scorers("reference", initial),
        teacher=scorers("teacher"),
        transport=make_transport(chosen_transport(config), config.refit),
        gate=gate,
        proof=_proof(config, gate, trainer, engine, vocab_limit, renderer.config.max_tokens),
        refit_steps=[],
    )


def _renderer(config: RunConfig, task: Task, tokenizer: Any, model: Any, say: Callable[[str], None]) -> PromptRenderer:
    """Renders the run's prompts, and has rendered all that it will ask."""
    num_embeddings = model.get_input_embeddings().num_embeddings
    prompt = within_context(config.prompt, model, say)
    renderer = PromptRenderer(tokenizer, prompt, num_embeddings=num_embeddings)
    with span("start/prompts"):
        if told := check_prompts(task, renderer, num_train=num_asked(config), num_heldout=config.eval.num_problems):
            say(told)
    say_too_few_heldout(config, task, say)
    return renderer


def say_too_few_heldout(config: RunConfig, task: Task, say: Callable[[str], None]) -> None:
    """Of a file of held-out problems the number is known only now; each is asked once."""
    there = task.num_problems("heldout")
    if there < config.eval.num_problems:
        say(f"eval.num_problems: {there} instead of {config.eval.num_problems} (no more problems are held out)")


def _trainer(config: RunConfig, model: Any, vocab_limit: int) -> FsdpTrainer:
    return FsdpTrainer(
        model,
        config.trainer,
        total_optimizer_steps=config.steps * config.algorithm.optimizer_steps_per_batch,
        temperature=config.rollout.temperature,
        vocab_limit=vocab_limit,
    )


def _proof(
    config: RunConfig, gate: Gate, trainer: FsdpTrainer, engine: Engine, vocab_limit: int, max_prompt_tokens: int
) -> RefitProof:
    model: Any = trainer.model
    return RefitProof(
        trainer,
        engine,
        proof_bounds(config, gate, model.device.type),
        vocab_limit=vocab_limit,
        longest=served_length(config, model, max_prompt_tokens),
        in_bfloat16="bfloat16" in (config.trainer.dtype, config.rollout.dtype),
    )


def proof_bounds(config: RunConfig, gate: Gate, device: str) -> tuple[BoundConfig, ...]:
    """The bounds of a refit's probes: the gate's. Those of an unquantised run if the torch engine is quantised and
    there are any, because the reference then computes with the quantised weights too; vLLM's kernels also round what
    they multiply them with."""
    if config.rollout.quantisation == "none" or config.rollout.engine == "vllm":
        return gate.bounds
    plain = config.rollout.model_copy(update={"quantisation": "none"})
    return fitting_bounds(config.model_copy(update={"rollout": plain}), device) or gate.bounds


def _longest(config: RunConfig, model: Any, renderer: PromptRenderer) -> int:
    """Tokens of the longest prompt and answer together that the run can come to."""
    wanted = renderer.config.max_tokens + config.rollout.max_new_tokens
    return min(wanted, context_of(model) or wanted)


def _scorer(
    config: RunConfig,
    device: str,
    tokenizer: Any,
    vocab_limit: int,
    longest: int,
    say: Callable[[str], None],
    section: Literal["reference", "teacher"],
    model: Any = None,
) -> Scorer | None:
    """``model``, or the one of the configuration's section, frozen: it scores sequences in the trainer's precision and
    at the run's temperature. None where there is neither. Raises ModelError if its tokens are others or too few."""
    if model is None:
        source = config.reference if section == "reference" else config.teacher
        if source is None:
            return None
        model = _load(source, config, device)
        try:
            other = other_token(tokenizer, load_tokenizer(source), vocab_limit)
        except ModelError as error:  # it scores without one
            other = None
            say(f"{section}: that its tokens mean what the policy's mean is taken on trust ({error})")
        if other is not None:
            raise ModelError(f"{section}: {other}; use a model with the policy's tokenizer")
        context = context_of(model)
        if context is not None and context < longest:
            raise ModelError(
                f"{section}: its context is {context} tokens, and a prompt with its answer can have {longest}; lower "
                "prompt.max_tokens or rollout.max_new_tokens, or use a model with a longer context"
            )
        rows = model.get_output_embeddings().weight.shape[0]
        if rows < vocab_limit:
            raise ModelError(
                f"{section}: its head has {rows} rows, fewer than the {vocab_limit} tokens of the policy's vocabulary; "
                "use a model with the policy's tokenizer"
            )
    return ReferenceScorer(
        model,
        temperature=config.rollout.temperature,
        vocab_limit=vocab_limit,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        chunk_tokens=config.trainer.logprob_chunk_tokens,
        packing=config.trainer.packing,
    )


def within_context(prompt: PromptConfig, model: Any, say: Callable[[str], None]) -> PromptConfig:
    """The prompt settings with ``max_tokens`` lowered to what the model's context can hold with one answer token, so
    that ``prompt.overlong`` applies to prompts that could not be answered at all."""
    context = context_of(model)
    if context is None or prompt.max_tokens < context:
        return prompt
    say(f"prompt.max_tokens: {context - 1} instead of {prompt.max_tokens} (the model's context is {context} tokens)")
    return prompt.model_copy(update={"max_tokens": context - 1})


def num_asked(config: RunConfig) -> int:
    """Training prompts that the run asks at most, over-long ones that are skipped left out of account."""
    algorithm = config.algorithm
    rounds = 1 + (algorithm.dynamic_sampling.max_refill_rounds if algorithm.dynamic_sampling.enabled else 0)
    supervised = config.supervised.steps * config.supervised.batch_size
    return max(config.steps * algorithm.num_prompts * rounds, supervised)


def stop_token_ids(tokenizer: Any, model: Any) -> tuple[int, ...]:
    """Tokens that end a completion: the tokenizer's end of sequence and those of the model's generation config."""
    ids = {tokenizer.eos_token_id}
    declared = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids.update(declared if isinstance(declared, list) else [declared])
    return tuple(sorted(token_id for token_id in ids if token_id is not None))
