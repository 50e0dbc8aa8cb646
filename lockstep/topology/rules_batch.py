"""Rules of the batch and of runs in which rollout and training overlap."""

from __future__ import annotations

from lockstep.topology.records import Job
from lockstep.topology.repairs import divisors
from lockstep.topology.rules import Changes, batch_of, data_parallel, rule, samples_per_step, train_of

LOADER = "miles miles/utils/arguments.py: miles_validate_args; verl verl/trainer/config: validate_config"
ASYNC = "miles miles/utils/arguments.py: _resolve_rollout_functions (--fully-async)"


# --- arithmetic -------------------------------------------------------------------------------------------------------


def equal_steps(job: Job) -> list[Changes]:
    """Other sizes of a step, numbers of steps or of prompts for which the product comes out, nearest first."""
    batch = batch_of(job)
    samples = batch.num_prompts * batch.group_size
    changes: list[Changes] = []
    if batch.global_batch is not None and samples % batch.optimizer_steps == 0:
        changes.append((("batch.global_batch", samples // batch.optimizer_steps),))
    if batch.global_batch is not None and samples % batch.global_batch == 0:
        changes.append((("batch.optimizer_steps", samples // batch.global_batch),))
    if batch.global_batch is not None and batch.global_batch * batch.optimizer_steps % batch.group_size == 0:
        changes.append((("batch.num_prompts", batch.global_batch * batch.optimizer_steps // batch.group_size),))
    steps = sorted(divisors(samples), key=lambda size: abs(size - batch.optimizer_steps))
    for count in steps:
        size = None if batch.global_batch is None else samples // count
        changes.append((("batch.optimizer_steps", count), *((("batch.global_batch", size),) if size else ())))
    return changes


@rule("batch-steps", source=LOADER, needs="batch", knobs=(equal_steps,))
def batch_steps(job: Job) -> str | None:
    """prompts · samples per prompt = global batch · optimizer steps."""
    batch = batch_of(job)
    samples = batch.num_prompts * batch.group_size
    made = f"{batch.num_prompts} prompts · {batch.group_size} samples = {samples}"
    if batch.global_batch is None:
        rest = samples % batch.optimizer_steps
        return f"{made} do not divide into {batch.optimizer_steps} optimizer steps" if rest else None
    used = batch.global_batch * batch.optimizer_steps
    return (
        None
        if samples == used
        else f"{made}, but global_batch {batch.global_batch} · {batch.optimizer_steps} steps = {used}"
    )


def step_sizes(job: Job) -> list[Changes]:
    """Steps of a number of samples that the ranks share evenly, with as many prompts as they take."""
    batch, unit = batch_of(job), _unit(job)
    now = samples_per_step(job)
    sizes = [size for near in (now // unit, now // unit + 1) if (size := near * unit) > 0]
    changes: list[Changes] = []
    for extra in range(batch.group_size):
        for size in sorted(
            {max(unit, sizes[0] - extra * unit), sizes[-1] + extra * unit}, key=lambda size: abs(size - now)
        ):
            samples = size * batch.optimizer_steps
            if samples % batch.group_size == 0:
                stated = (("batch.global_batch", size),) if batch.global_batch is not None else ()
                changes.append((*stated, ("batch.num_prompts", samples // batch.group_size)))
    return changes


def _unit(job: Job) -> int:
    """Samples that one micro-batch of every rank takes."""
    return (batch_of(job).micro_batch or 1) * data_parallel(job)


@rule(
    "batch-ranks",
    source=f"{LOADER}; verl-project/verl#473 (only equal chunks)",
    needs="train batch",
    knobs=(step_sizes, "batch.optimizer_steps", "nodes"),
)
def batch_ranks(job: Job) -> str | None:
    """Each optimizer step has at least one sample for every data-parallel rank."""
    samples, ranks = samples_per_step(job), data_parallel(job)
    return (
        f"{samples} samples a step for {ranks} data-parallel ranks: some would have none" if samples < ranks else None
    )


@rule(
    "batch-split",
    source="Megatron-LM megatron/core/num_microbatches_calculator.py: ConstantNumMicroBatchesCalculator",
    needs="megatron batch",
    knobs=(step_sizes, "batch.micro_batch", "nodes", "train.cp"),
)
def batch_split(job: Job) -> str | None:
    """The samples of a step divide by micro-batch · data-parallel size."""
    samples, ranks, micro = samples_per_step(job), data_parallel(job), batch_of(job).micro_batch or 1
    if samples % _unit(job) == 0 or samples < ranks:
        return None
    fitting = [size for size in divisors(samples) if samples // size % micro == 0] or [1]
    near = sorted(fitting, key=lambda size: abs(size - ranks))[:2]
    return (
        f"{samples} samples a step do not divide by micro_batch {micro} · dp {ranks} = {_unit(job)} "
        f"(dp {' or '.join(map(str, near))} would)"
    )


@rule(
    "batch-uneven",
    severity="warning",
    source="Lockstep: a step lasts as long as its slowest rank",
    needs="fsdp batch",
    knobs=(step_sizes,),
)
def batch_uneven(job: Job) -> str | None:
    """The samples of a step divide by the ranks, or some ranks hold one more and the others wait."""
    samples, ranks = samples_per_step(job), data_parallel(job)
    return f"{samples} samples a step do not divide over {ranks} ranks" if samples % ranks and samples > ranks else None


@rule(
    "sample-length",
    severity="note",
    source="miles training_utils/data.py: get_data_iterator; verl seqlen_balancing.py: rearrange_micro_batches",
    needs="train batch",
)
def sample_length(job: Job) -> str | None:
    """A sample longer than the token budget is a micro-batch of its own, and samples that are padded have no budget:
    memory is planned for the length."""
    batch, cp = batch_of(job), train_of(job).cp * train_of(job).ulysses
    if batch.max_tokens_per_gpu is None or batch.response_tokens is None:
        return None
    longest, budget = (batch.prompt_tokens or 0) + batch.response_tokens, batch.max_tokens_per_gpu * cp
    if not batch.packing and train_of(job).backend == "megatron":
        each = batch.micro_batch or 1
        return f"{each} padded sample(s) of up to {longest} tokens a micro-batch: max_tokens_per_gpu has no effect"
    if longest <= budget:
        return None
    shared = "ulysses" if train_of(job).backend == "fsdp" else "cp"
    text = f"a sample of up to {longest} tokens exceeds the budget {batch.max_tokens_per_gpu}" + (
        f" · {shared} {cp}" if cp > 1 else ""
    )
    verl = train_of(job).switches.implementation == "verl"
    return text + (": verl stops at the first one" if verl else ": it is a micro-batch of its own")


# --- asynchronous -----------------------------------------------------------------------------------------------------


def apart(job: Job) -> list[Changes]:
    """Trainer and engines apart: about half of the devices for each, in whole engines; then no overlap."""
    engine = job.engine.gpus_per_engine if job.engine else 1
    shares = sorted(range(engine, job.num_gpus, engine), key=lambda share: abs(2 * share - job.num_gpus))
    return [*((("colocated", False), ("rollout_gpus", share)) for share in shares), (("fully_async", False),)]


@rule("async-colocated", source=ASYNC, needs="train engine", knobs=(apart,))
def async_colocated(job: Job) -> str | None:
    """Fully asynchronous runs are not colocated: rollout goes on while training runs."""
    return f"fully_async on {job.num_gpus} colocated devices" if job.fully_async and job.colocated else None


@rule("async-partial", source=ASYNC, knobs=("partial_rollout", "fully_async"))
def async_partial(job: Job) -> str | None:
    """Fully asynchronous runs never stop a rollout, so there is none to continue."""
    return "fully_async with partial_rollout" if job.fully_async and job.partial_rollout else None


@rule("async-pause", source=ASYNC, knobs=("pause_mode", "fully_async"))
def async_pause(job: Job) -> str | None:
    """In fully asynchronous runs requests are always in flight: a weight update that aborts them would repeat all."""
    return "fully_async with pause_mode abort" if job.fully_async and job.pause_mode == "abort" else None


@rule("async-engine", source=ASYNC, needs="torch", knobs=("fully_async",))
def async_engine(job: Job) -> str | None:
    """The embedded engine shares the trainer's process, so the two can't overlap."""
    return "fully_async with the torch engine" if job.fully_async else None


def single_step(job: Job) -> list[Changes]:
    """One optimizer step on the whole batch."""
    batch = batch_of(job)
    size = (("batch.global_batch", batch.num_prompts * batch.group_size),) if batch.global_batch is not None else ()
    return [(("batch.optimizer_steps", 1), *size)]


@rule("staleness-steps", severity="warning", source="radixark/miles#2524, #1697", needs="batch", knobs=(single_step,))
def staleness_steps(job: Job) -> str | None:
    """A staleness bound holds when a batch is taken; each further optimizer step on that batch adds one version."""
    limit, steps = job.max_staleness, batch_of(job).optimizer_steps
    if limit is None or steps == 1:
        return None
    bound = limit + steps - 1
    return (
        f"max_staleness {limit} with {steps} optimizer steps a batch: the last of them trains {bound} versions behind"
    )
