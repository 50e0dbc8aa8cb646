"""Rules of Megatron's other switches: sequence parallelism, overlaps, FSDP inside Megatron, packing, connections."""

from __future__ import annotations

from lockstep.topology.records import Job
from lockstep.topology.rules import Changes, batch_of, rule, train_of
from lockstep.topology.rules_megatron import ARGUMENTS


@rule(
    "sequence-parallel-alone",
    severity="warning",
    source=f"{ARGUMENTS} (turns it off)",
    needs="megatron",
    knobs=("train.sequence_parallel",),
)
def sequence_parallel_alone(job: Job) -> str | None:
    """Sequence parallelism does nothing with tp 1."""
    return (
        "sequence_parallel with tp 1 has no effect"
        if train_of(job).sequence_parallel and train_of(job).tp == 1
        else None
    )


@rule(
    "tensor-overlap",
    source=ARGUMENTS,
    needs="megatron",
    knobs=("train.sequence_parallel", "train.switches.tp_comm_overlap"),
)
def tensor_overlap(job: Job) -> str | None:
    """Overlapping tensor-parallel communication needs sequence parallelism."""
    missing = train_of(job).switches.tp_comm_overlap and not train_of(job).sequence_parallel
    return "tp_comm_overlap without sequence_parallel" if missing else None


@rule(
    "saved-activations",
    source=ARGUMENTS,
    needs="megatron",
    knobs=("train.switches.distribute_saved_activations",),
)
def saved_activations(job: Job) -> str | None:
    """Saved activations are distributed only where sequence parallelism does not do it already."""
    both = train_of(job).switches.distribute_saved_activations and train_of(job).sequence_parallel
    return "distribute_saved_activations with sequence_parallel" if both else None


def megatron_fsdp_instead(job: Job) -> list[Changes]:
    """Megatron's own FSDP."""
    return [(("train.switches.torch_fsdp2", False), ("train.switches.megatron_fsdp", True))]


@rule("torch-fsdp2", source=ARGUMENTS, needs="megatron", knobs=(megatron_fsdp_instead, "train.switches.torch_fsdp2"))
def torch_fsdp2(job: Job) -> str | None:
    """PyTorch's FSDP2 inside Megatron excludes pipelines, expert parallelism, the distributed optimizer and tied
    embeddings."""
    train = train_of(job)
    obstacles = {
        f"pp {train.pp}": train.pp > 1,
        f"ep {train.ep}": train.ep > 1,
        "distributed_optimizer": job.memory.distributed_optimizer,
        "tied embeddings": job.model.tied_embeddings,
    }
    there = [text for text, present in obstacles.items() if present]
    return f"torch_fsdp2 with {', '.join(there)}" if train.switches.torch_fsdp2 and there else None


@rule(
    "packing-micro-batch",
    source=f"{ARGUMENTS} (sequence packing)",
    needs="megatron batch",
    knobs=("batch.micro_batch",),
)
def packing_micro_batch(job: Job) -> str | None:
    """A packed micro-batch of Megatron's own loop is one row: its size is 1. miles and verl pack several samples."""
    batch = batch_of(job)
    if train_of(job).switches.implementation in ("miles", "verl"):
        return None
    return (
        f"packing with micro_batch {batch.micro_batch}: it is 1"
        if batch.packing and (batch.micro_batch or 1) > 1
        else None
    )


def connections(job: Job) -> list[Changes]:
    """CUDA_DEVICE_MAX_CONNECTIONS as the trainer needs it."""
    fsdp = train_of(job).switches.torch_fsdp2 or train_of(job).switches.megatron_fsdp
    trainer = {
        name: value for name, value in job.environment["trainer"].items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"
    }
    if not fsdp:
        trainer["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return [(("environment", {**job.environment, "trainer": trainer}),)]


@rule("device-connections", source=ARGUMENTS, needs="megatron", knobs=(connections,))
def device_connections(job: Job) -> str | None:
    """Before Blackwell, tp or cp above 1 needs CUDA_DEVICE_MAX_CONNECTIONS=1 (gfx950 counts as 9); FSDP refuses that
    value. Says nothing where the trainer's environment is not stated."""
    if "trainer" not in job.environment:
        return None
    train, switches = train_of(job), train_of(job).switches
    value = job.environment["trainer"].get("CUDA_DEVICE_MAX_CONNECTIONS")
    if switches.torch_fsdp2 or switches.megatron_fsdp:
        return "CUDA_DEVICE_MAX_CONNECTIONS=1 with FSDP, which refuses it" if value == "1" else None
    blackwell = job.hardware.arch.startswith("sm") and int(job.hardware.arch[2:]) >= 100
    if value == "1" or blackwell or job.hardware.vendor == "cpu" or train.tp * train.cp == 1:
        return None
    if switches.ep_a2a_overlap:
        return None  # Megatron only warns then
    stated = "unset" if value is None else value
    return (
        f"CUDA_DEVICE_MAX_CONNECTIONS {stated} with tp {train.tp}, cp {train.cp} on {job.hardware.name}: it must be 1"
    )
