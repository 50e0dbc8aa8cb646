"""Rules of mixture-of-experts layers in Megatron. None of them can fire on a dense model."""

from __future__ import annotations

from lockstep.topology.grids import expert_tensor_size
from lockstep.topology.records import Job
from lockstep.topology.rules import Changes, rule, train_of
from lockstep.topology.rules_megatron import ARGUMENTS, CONFIG

MOE_LAYER = "Megatron-LM megatron/core/transformer/moe/moe_layer.py"
DISPATCHER = "Megatron-LM megatron/core/transformer/moe/token_dispatcher.py"
_BACKENDS = ("deepep", "hybridep", "ncclep")


def dispatcher(job: Job) -> tuple[str | None, str | None]:
    """Dispatcher and its flex back end, also where the back end's name was given as the dispatcher's."""
    train = train_of(job)
    if train.moe_dispatcher in _BACKENDS:
        return "flex", train.moe_dispatcher
    return train.moe_dispatcher, train.switches.moe_flex_backend if train.moe_dispatcher == "flex" else None


@rule(
    "experts-ep", source=f"{ARGUMENTS}; {MOE_LAYER}: BaseMoELayer.__init__", needs="megatron moe", knobs=("train.ep",)
)
def experts_ep(job: Job) -> str | None:
    """The number of experts divides by ep."""
    experts, ep = job.model.num_experts, train_of(job).ep
    return f"{experts} experts do not divide by ep {ep}" if experts % ep else None


@rule(
    "sequence-parallel-moe",
    source=f"{MOE_LAYER}: MoELayer.forward, at the first training step",
    needs="megatron moe",
    knobs=("train.sequence_parallel",),
)
def sequence_parallel_moe(job: Job) -> str | None:
    """A MoE model trains with tp above 1 only under sequence parallelism."""
    train = train_of(job)
    return (
        f"tp {train.tp} without sequence_parallel on a MoE model"
        if train.tp > 1 and not train.sequence_parallel
        else None
    )


@rule(
    "moe-dispatcher",
    source=f"{CONFIG}; {DISPATCHER}",
    needs="megatron moe",
    knobs=("train.moe_dispatcher", "train.switches.moe_flex_backend"),
)
def moe_dispatcher(job: Job) -> str | None:
    """The dispatcher is allgather, alltoall or flex, and flex has one of its back ends."""
    kind, backend = dispatcher(job)
    if kind not in (None, "allgather", "alltoall", "flex"):
        return f"dispatcher {kind}: it is allgather, alltoall or flex"
    if kind == "flex" and backend is not None and backend not in _BACKENDS:
        return f"flex back end {backend}: it is {', '.join(_BACKENDS)}"
    return None


def plain_dispatcher(job: Job) -> list[Changes]:
    """The all-to-all dispatcher."""
    return [
        (("train.moe_dispatcher", "alltoall"), ("train.switches.moe_flex_backend", None)),
        (
            ("train.moe_dispatcher", "alltoall"),
            ("train.switches.moe_flex_backend", None),
            ("train.switches.moe_rank_capacity_factor", None),
        ),
    ]


@rule("dispatcher-ranks", source=DISPATCHER, needs="megatron moe", knobs=("train.moe_dispatcher", plain_dispatcher))
def dispatcher_ranks(job: Job) -> str | None:
    """deepep and ncclep need more than one rank in etp · ep."""
    train, (_, backend) = train_of(job), dispatcher(job)
    ranks = expert_tensor_size(train) * train.ep
    if backend not in ("deepep", "ncclep") or ranks > 1:
        return None
    return f"dispatcher {backend} with etp · ep = {ranks}: it needs more than 1"


@rule(
    "dispatcher-padding",
    source=DISPATCHER,
    needs="megatron moe",
    knobs=("train.switches.moe_pad_to_capacity", plain_dispatcher),
)
def dispatcher_padding(job: Job) -> str | None:
    """deepep does not pad experts' inputs to their capacity."""
    if dispatcher(job)[1] != "deepep" or not train_of(job).switches.moe_pad_to_capacity:
        return None
    return "moe_pad_to_capacity with dispatcher deepep"


@rule(
    "dispatcher-probabilities",
    source=f"{DISPATCHER} (DeepEP takes float32 probabilities)",
    needs="megatron moe",
    knobs=("train.switches.moe_router_dtype", plain_dispatcher),
)
def dispatcher_probabilities(job: Job) -> str | None:
    """deepep takes float32 probabilities, so the router's dtype, where stated, is fp32."""
    dtype = train_of(job).switches.moe_router_dtype
    if dispatcher(job)[1] != "deepep" or dtype in (None, "fp32"):
        return None
    return f"moe_router_dtype {dtype} with dispatcher deepep, which takes fp32"


@rule(
    "dispatcher-capacity",
    source=CONFIG,
    needs="megatron moe",
    knobs=("train.switches.moe_rank_capacity_factor",),
)
def dispatcher_capacity(job: Job) -> str | None:
    """A rank capacity factor exists for the back ends hybridep and ncclep only."""
    factor, (kind, backend) = train_of(job).switches.moe_rank_capacity_factor, dispatcher(job)
    if factor is None or backend in ("hybridep", "ncclep"):
        return None
    name = backend or kind or "not stated"
    return f"moe_rank_capacity_factor {factor} with dispatcher {name}: hybridep and ncclep have one"


@rule(
    "shared-expert-overlap",
    source=CONFIG,
    needs="megatron moe",
    knobs=("train.moe_dispatcher", "train.switches.moe_shared_expert_overlap"),
)
def shared_expert_overlap(job: Job) -> str | None:
    """Overlapping the shared experts needs the alltoall or flex dispatcher."""
    kind, _ = dispatcher(job)
    if not train_of(job).switches.moe_shared_expert_overlap or kind in (None, "alltoall", "flex"):
        return None
    return f"moe_shared_expert_overlap with dispatcher {kind}: alltoall or flex can overlap"


@rule(
    "grouped-gemm",
    source=f"{ARGUMENTS} (compute capability); {CONFIG} (Transformer Engine)",
    needs="megatron moe",
    knobs=("train.switches.moe_grouped_gemm", "memory.fp8"),
)
def grouped_gemm(job: Job) -> str | None:
    """Grouped matrix products need compute capability 8, and in fp8 Transformer Engine 1.11."""
    switches, arch = train_of(job).switches, job.hardware.arch
    if not switches.moe_grouped_gemm:
        return None
    if arch.startswith("sm") and int(arch[2:]) < 80:
        return f"moe_grouped_gemm on {job.hardware.name} ({arch}): it needs sm80 or newer"
    if job.memory.fp8 != "none" and switches.te_version and switches.te_version < (1, 11):
        version = ".".join(map(str, switches.te_version))
        return f"moe_grouped_gemm with fp8 {job.memory.fp8} needs Transformer Engine 1.11, not {version}"
    return None


@rule(
    "expert-bias", source=CONFIG, needs="megatron moe", knobs=("train.switches.moe_expert_bias", "model.router_score")
)
def expert_bias(job: Job) -> str | None:
    """A router's correction bias needs sigmoid or sqrtsoftplus scores."""
    score = job.model.router_score
    if not train_of(job).switches.moe_expert_bias or score in (None, "sigmoid", "sqrtsoftplus"):
        return None
    return f"moe_expert_bias with {score} scores: it needs sigmoid or sqrtsoftplus"


@rule("expert-linear-bias", source=CONFIG, needs="megatron moe", knobs=("train.switches.moe_linear_bias", "train.etp"))
def expert_linear_bias(job: Job) -> str | None:
    """Linear layers of experts have a bias only without expert-tensor parallelism."""
    etp = expert_tensor_size(train_of(job))
    return (
        f"moe_linear_bias with etp {etp}: it needs etp 1"
        if train_of(job).switches.moe_linear_bias and etp > 1
        else None
    )


@rule("single-expert-softmax", source=CONFIG, needs="megatron moe", knobs=("train.switches.moe_pre_softmax",))
def single_expert_softmax(job: Job) -> str | None:
    """One expert per token with softmax scores needs the softmax before the choice: after it, the score is always 1."""
    model = job.model
    if model.experts_per_token != 1 or model.router_score != "softmax" or train_of(job).switches.moe_pre_softmax:
        return None
    return "1 expert per token with softmax scores and moe_pre_softmax off"


def _overlap_obstacles(job: Job) -> list[str]:
    train, (kind, _) = train_of(job), dispatcher(job)
    chunked = train.virtual_stages or train.switches.layers_per_virtual_stage or train.switches.pipeline_layout
    obstacles = {
        f"ep {train.ep} (more than 1)": train.ep == 1,
        f"dispatcher {kind} (alltoall or flex)": kind == "allgather",
        f"weights in {job.memory.weight_dtype} (bf16)": job.memory.weight_dtype != "bf16",
        "recompute full (selective or none)": job.memory.recompute == "full",
        "moe_shared_expert_overlap (off)": train.switches.moe_shared_expert_overlap,
        f"pp {train.pp} and virtual_stages unset (set)": train.pp > 1 and not chunked,
        f"{job.model.mtp_layers} MTP layers (at most 1)": job.model.mtp_layers > 1,
    }
    return [text for text, there in obstacles.items() if there]


def overlap_possible(job: Job) -> list[Changes]:
    """What the overlap needs, as far as it is a setting."""
    train = train_of(job)
    changes: list[tuple[str, object]] = []
    if train.moe_dispatcher == "allgather":
        changes.append(("train.moe_dispatcher", "alltoall"))
    if job.memory.weight_dtype != "bf16":
        changes.append(("memory.weight_dtype", "bf16"))
    if job.memory.recompute == "full":
        changes += [
            ("memory.recompute", "selective"),
            ("memory.recompute_method", None),
            ("memory.recompute_num_layers", None),
        ]
    if train.switches.moe_shared_expert_overlap:
        changes.append(("train.switches.moe_shared_expert_overlap", False))
    plain: list[Changes] = [tuple(changes)] if changes else []
    return plain + [(*changes, ("train.virtual_stages", virtual)) for virtual in range(2, job.model.num_layers + 1)]


@rule(
    "expert-overlap",
    source=CONFIG,
    needs="megatron moe",
    knobs=(overlap_possible, "train.switches.ep_a2a_overlap"),
)
def expert_overlap(job: Job) -> str | None:
    """Overlapping the experts' all-to-all needs ep above 1, alltoall or flex, bf16, no full recomputation, no overlap
    of shared experts, virtual stages in a pipeline, and at most one MTP layer."""
    if not train_of(job).switches.ep_a2a_overlap:
        return None
    obstacles = _overlap_obstacles(job)
    return f"ep_a2a_overlap with {'; '.join(obstacles)}" if obstacles else None
