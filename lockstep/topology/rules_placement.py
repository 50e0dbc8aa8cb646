"""Rules of the devices: sizes are positive, what is asked for exists, trainer and engines share it as they say."""

from __future__ import annotations

from lockstep.topology.records import Job
from lockstep.topology.repairs import divisors
from lockstep.topology.rules import Changes, engine_of, fast_gpus, plain_sizes, rule, train_of

_TRAIN = "tp pp cp ep etp replicate ulysses virtual_stages vocab_divisor"
_ENGINE = (
    "gpus_per_engine tp pp dp ep prefill_cp decode_cp attention_cp moe_dp moe_dense_tp page_tokens max_running_requests"
)
_BATCH = "num_prompts group_size optimizer_steps global_batch micro_batch max_tokens_per_gpu pad_multiple"


def sizes_below_one(job: Job) -> dict[str, int]:
    """Settings that count something and are below 1, by path."""
    sizes = plain_sizes(job, "", "nodes gpus_per_node")
    if job.train:
        sizes |= plain_sizes(job.train, "train.", _TRAIN)
        sizes |= plain_sizes(
            job.train.switches, "train.switches.", "optimizer_instances layers_per_virtual_stage microbatch_group"
        )
    if job.engine:
        sizes |= plain_sizes(job.engine, "engine.", _ENGINE)
    if job.batch:
        sizes |= plain_sizes(job.batch, "batch.", _BATCH)
    return {path: size for path, size in sizes.items() if size < 1}


def every_size_one(job: Job) -> list[Changes]:
    """All sizes below 1 at 1."""
    return [tuple((path, 1) for path in sizes_below_one(job))]


@rule("sizes-positive", source="a size counts ranks, layers or samples", knobs=(every_size_one,))
def sizes_positive(job: Job) -> str | None:
    """Every parallel size, number of devices and batch size is at least 1."""
    wrong = sizes_below_one(job)
    return ", ".join(f"{path} = {size}" for path, size in wrong.items()) + " is below 1" if wrong else None


def whole_nodes(job: Job) -> list[Changes]:
    """The same number of devices on nodes that exist."""
    held = job.hardware.gpus_per_node
    nodes = -(-job.num_gpus // held)
    exact = [size for size in divisors(job.num_gpus) if size <= held]
    return [
        (("nodes", nodes), ("gpus_per_node", held)),
        (("nodes", job.num_gpus // exact[-1]), ("gpus_per_node", exact[-1])),
    ]


@rule(
    "node-devices",
    source="hardware catalogue; a placement that asks one node for more waits for ever: allenai/open-instruct#1431",
    knobs=(whole_nodes, "gpus_per_node"),
)
def node_devices(job: Job) -> str | None:
    """No node is asked for more devices than it has. Of devices that nobody named the size of a node is not known."""
    held = job.hardware.gpus_per_node
    if job.hardware.memory_bytes is None or job.gpus_per_node <= held:
        return None
    return f"{job.gpus_per_node} devices a node, but a node of {job.hardware.name} has {held}"


@rule(
    "rollout-share",
    source="miles ray/placement_group.py: create_placement_groups",
    needs="train engine",
    knobs=("rollout_gpus",),
)
def rollout_share(job: Job) -> str | None:
    """Apart, the engines' devices and the trainer's are both some of the job's."""
    if job.colocated or 0 < job.rollout_gpus < job.num_gpus:
        return None
    rest = job.num_gpus - job.rollout_gpus
    return (
        f"{job.rollout_gpus} of {job.num_gpus} devices are the engines' and {rest} the trainer's: each needs at least 1"
    )


@rule(
    "rollout-share-colocated",
    severity="warning",
    source="miles utils/arguments.py: miles_validate_args (colocate overrides rollout_num_gpus)",
    needs="train engine",
    knobs=("rollout_gpus",),
)
def rollout_share_colocated(job: Job) -> str | None:
    """Colocated, the engines have all devices: a number of their own has no effect."""
    if not job.colocated or job.rollout_gpus in (0, job.num_gpus):
        return None
    return f"rollout_gpus {job.rollout_gpus} has no effect when colocated: the engines use all {job.num_gpus} devices"


def engine_scale(job: Job) -> list[Changes]:
    """Engines of another size: tp, and the experts' size where it is the whole engine, go with the devices."""
    engine = engine_of(job)
    changes: list[Changes] = []
    for size, devices in _engine_sizes(job):
        for name in ("tp", "dp"):
            product, rest = engine.gpus_per_engine, getattr(engine, name)
            if rest * size % product:
                continue
            scaled = rest * size // product
            base = (("engine.gpus_per_engine", size), (f"engine.{name}", scaled), *devices)
            changes.append(base)
            if engine.ep == rest and engine.ep > 1:
                changes.append((*base, ("engine.ep", scaled)))
            if engine.ep == engine.tp * engine.dp and engine.ep > 1:
                changes.append((*base, ("engine.ep", engine.ep * scaled // rest)))
    changes.sort(key=lambda entry: (abs(entry[0][1] - engine.gpus_per_engine), len(entry)))
    return changes + [_plain_engine(job, size) for size in reversed(divisors(max(1, job.engine_pool)))]


def _engine_sizes(job: Job) -> list[tuple[int, Changes]]:
    """Sizes that divide the engines' devices. A lone engine on one node has as many devices as it asks for, so there
    those that divide a node too."""
    pool = max(1, job.engine_pool)
    sizes: list[tuple[int, Changes]] = [(size, ()) for size in divisors(pool)]
    if job.train is None and job.nodes == 1 and job.engine_pool == engine_of(job).gpus_per_engine:
        node = divisors(max(1, job.hardware.gpus_per_node))
        sizes += [(size, (("gpus_per_node", size),)) for size in node if pool % size]
    return sizes


def _plain_engine(job: Job, size: int) -> Changes:
    """An engine that splits the model by tensor parallelism alone."""
    names = "pp dp ep prefill_cp decode_cp attention_cp moe_dp"
    wanted: dict[str, object] = {"gpus_per_engine": size, "tp": size, **dict.fromkeys(names.split(), 1)}
    wanted |= {"dp_attention": False, "moe_dense_tp": None}
    engine = engine_of(job)
    return tuple((f"engine.{name}", value) for name, value in wanted.items() if getattr(engine, name) != value)


@rule(
    "engine-pool",
    source="miles ray/rollout.py: engines = rollout GPUs // GPUs per engine",
    needs="engine",
    knobs=(engine_scale, "nodes", "rollout_gpus"),
)
def engine_pool(job: Job) -> str | None:
    """The engines' devices divide into whole engines."""
    size, pool = engine_of(job).gpus_per_engine, job.engine_pool
    return f"{pool} devices do not divide into engines of {size}" if pool % size or pool < size else None


@rule(
    "tensor-fast-links",
    severity="warning",
    source="Megatron-LM megatron/core/parallel_state.py: RankGenerator (tp varies fastest); node topology",
    needs="megatron",
    knobs=("train.tp",),
)
def tensor_fast_links(job: Job) -> str | None:
    """A tensor-parallel group lies within one node's fast links: it communicates twice a layer in each direction."""
    size, island = train_of(job).tp, fast_gpus(job)
    return _crosses("tensor-parallel", size, island) if job.train_world > island and size > 1 else None


@rule(
    "engine-fast-links",
    severity="warning",
    source="vLLM and SGLang place an engine's ranks in order over the nodes; node topology",
    needs="engine",
    knobs=(engine_scale,),
)
def engine_fast_links(job: Job) -> str | None:
    """An engine's tensor-parallel group lies within one node's fast links."""
    size, island = engine_of(job).tp, fast_gpus(job)
    return _crosses("the engine's tensor-parallel", size, island) if job.engine_pool > island and size > 1 else None


def _crosses(what: str, size: int, island: int) -> str | None:
    if island % size == 0:
        return None
    return f"some groups of {what} size {size} cross the fast links of {island} devices"
