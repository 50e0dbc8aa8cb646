"""Rules of the FSDP back end: parameters are sharded over all ranks, or over groups that are replicated."""

from __future__ import annotations

from lockstep.topology.records import Job
from lockstep.topology.rules import Changes, batch_of, rule, train_of

MILES = "miles miles/backends/fsdp_utils/arguments.py: validate_hybrid_shard_args"
PYTORCH = "PyTorch torch/distributed/fsdp/_fully_shard: fully_shard over a mesh (replicate, shard)"


def shard_ranks(job: Job) -> int:
    """Ranks over which one copy of the parameters is sharded."""
    return job.train_world // (train_of(job).replicate or 1)


@rule("fsdp-replicate", source=MILES, needs="fsdp", knobs=("train.replicate", "nodes"))
def fsdp_replicate(job: Job) -> str | None:
    """The number of replicas divides the trainer's ranks."""
    replicas, world = train_of(job).replicate or 1, job.train_world
    return f"replicate {replicas} does not divide world {world}" if world % replicas or world < replicas else None


@rule("fsdp-cp", source="miles miles/utils/arguments.py: parse_args (FSDP back end)", needs="fsdp", knobs=("train.cp",))
def fsdp_cp(job: Job) -> str | None:
    """FSDP has no context parallelism."""
    cp = train_of(job).cp
    return f"cp {cp} with the fsdp back end: it needs cp 1" if cp != 1 else None


VERL = "verl verl/workers/engine/fsdp/transformer_impl.py; verl/models/transformers/monkey_patch.py"


@rule("fsdp-ulysses", source=VERL, needs="fsdp", knobs=("train.ulysses",))
def fsdp_ulysses(job: Job) -> str | None:
    """Ranks that share a sequence divide the trainer's ranks and the attention heads; of them and the key/value heads
    one divides the other."""
    size, world, model = train_of(job).ulysses, job.train_world, job.model
    heads, kv_heads = model.num_heads, model.num_kv_heads
    wrong = {
        f"{world} ranks": world % size,
        f"{heads} attention heads": heads % size,
        f"{kv_heads} key/value heads": model.attention == "gqa" and kv_heads % size and size % kv_heads,
    }
    there = [text for text, rest in wrong.items() if rest]
    return f"ulysses {size} does not divide {', '.join(there)}" if there else None


@rule("fsdp-ulysses-packing", source=VERL, needs="fsdp batch", knobs=("batch.packing", "train.ulysses"))
def fsdp_ulysses_packing(job: Job) -> str | None:
    """Sequences are shared among ranks without padding only."""
    shared = train_of(job).ulysses > 1 and not batch_of(job).packing
    return f"ulysses {train_of(job).ulysses} with padded sequences (use_remove_padding off)" if shared else None


def no_megatron_axes(job: Job) -> list[Changes]:
    """Axes that only Megatron has at 1, or Megatron itself."""
    train = train_of(job)
    sizes = {"tp": train.tp, "pp": train.pp}
    ones: list[tuple[str, object]] = [(f"train.{name}", 1) for name, size in sizes.items() if size != 1]
    ones += [("train.etp", None)] if (train.etp or 1) != 1 else []
    return [tuple(ones), (("train.backend", "megatron"),)]


@rule("fsdp-axes", source=PYTORCH, needs="fsdp", knobs=(no_megatron_axes,))
def fsdp_axes(job: Job) -> str | None:
    """FSDP shards parameters only: tensor, pipeline and expert-tensor parallelism are Megatron's."""
    train = train_of(job)
    wrong = {"tp": train.tp, "pp": train.pp, "etp": train.etp or 1}
    there = [f"{name} {size}" for name, size in wrong.items() if size != 1]
    return f"{', '.join(there)} with the fsdp back end" if there else None


@rule("fsdp-no-experts", source=PYTORCH, needs="fsdp", knobs=("train.ep",))
def fsdp_no_experts(job: Job) -> str | None:
    """A model without experts has no expert parallelism."""
    ep = train_of(job).ep
    return f"ep {ep} for {job.model.name}, which has no experts" if ep > 1 and not job.model.is_moe else None


@rule(
    "fsdp-experts",
    source="torchtitan torchtitan/distributed/parallel_dims.py (pytorch/torchtitan#4258)",
    needs="fsdp moe",
    knobs=("train.ep", "train.replicate"),
)
def fsdp_experts(job: Job) -> str | None:
    """Expert parallelism divides the experts, and the ranks that hold one copy of the parameters."""
    ep, ranks, experts = train_of(job).ep, shard_ranks(job), job.model.num_experts
    if ranks % ep == 0 and ranks >= ep and experts % ep == 0:
        return None
    return (
        f"ep {ep} must divide {experts} experts and the {ranks} ranks of a copy (world {job.train_world} / replicate)"
    )
