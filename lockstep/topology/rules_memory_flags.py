"""Rules of precision, optimizer, offload and recomputation: what excludes what, and fp8 blocks against shards."""

from __future__ import annotations

from lockstep.topology.grids import expert_tensor_size
from lockstep.topology.records import Job, ModelShape
from lockstep.topology.rules import Changes, rule, train_of
from lockstep.topology.rules_experts import dispatcher
from lockstep.topology.rules_megatron import ARGUMENTS, CONFIG

QUANTISER = (
    "TransformerEngine transformer_engine/pytorch/tensor/float8_blockwise_tensor.py: "
    "Float8BlockQuantizer.is_quantizable"
)


# --- fp8 against shards -----------------------------------------------------------------------------------------------


def _attention_widths(model: ModelShape, tp: int) -> dict[str, int]:
    """Widths of a rank's attention weights: what goes into the output projection, and what comes out of the fused or
    up-projections. DeepSeek-V4's heads of 512 are always whole blocks."""
    heads = model.num_heads // tp
    if model.attention in ("gqa", "inkling"):
        queries, keys = heads * model.head_dim, max(1, model.num_kv_heads // tp) * model.head_dim
        names = {"query": queries, "query, key and value": queries + 2 * keys}
    elif model.attention in ("mla", "mla_dsa"):
        up = {"query": model.rope_head_dim, "key and value": model.v_head_dim}
        names = {name: heads * (model.qk_nope_head_dim + size) for name, size in up.items()}
        names["value"] = heads * model.v_head_dim
    else:
        return {}
    return {f"{name} heads / tp {tp}": width for name, width in names.items()}


def sharded_widths(job: Job) -> dict[str, int]:
    """Widths of the weights' shards in training that quantisation blocks must divide, by what they are."""
    model, train = job.model, train_of(job)
    widths = {f"hidden {model.hidden}": model.hidden, **_attention_widths(model, train.tp)}
    if model.is_moe:
        etp = expert_tensor_size(train)
        widths[f"routed experts' {model.moe_ffn} / etp {etp}"] = model.moe_ffn // etp
        if model.num_shared_experts:
            shared = model.num_shared_experts * model.moe_ffn
            widths[f"shared experts' {shared} / tp {train.tp}"] = shared // train.tp
    if model.ffn and (not model.is_moe or model.dense_layers):
        widths[f"ffn {model.ffn} / tp {train.tp}"] = model.ffn // train.tp
    return widths


def experts_for_tensors(job: Job) -> list[Changes]:
    """Expert parallelism in place of expert-tensor parallelism."""
    train = train_of(job)
    etp = expert_tensor_size(train)
    return [(("train.etp", 1), ("train.ep", train.ep * etp))] if etp > 1 else []


@rule(
    "fp8-blocks",
    source=QUANTISER,
    needs="megatron",
    knobs=(experts_for_tensors, "train.etp", "train.tp", "memory.fp8"),
)
def fp8_blocks(job: Job) -> str | None:
    """In blockwise fp8 every shard of a weight is made of whole blocks of 128, in mxfp8 of 32."""
    block = {"blockwise": 128, "mxfp8": 32}.get(job.memory.fp8)
    if block is None:
        return None
    wrong = [f"{what} = {width}" for what, width in sharded_widths(job).items() if width % block]
    return f"fp8 {job.memory.fp8} needs shards in multiples of {block}: {', '.join(wrong)}" if wrong else None


@rule(
    "fp8-dispatcher",
    source=f"{CONFIG}; megatron/core/transformer/moe/moe_utils.py: get_align_size_for_quantization",
    needs="megatron moe",
    knobs=("train.moe_dispatcher", "train.switches.moe_router_padding"),
)
def fp8_dispatcher(job: Job) -> str | None:
    """fp8 experts get tokens in multiples of 16 (mxfp8: 32), and the allgather dispatcher can't pad to that."""
    kind, _ = dispatcher(job)
    padding = train_of(job).switches.moe_router_padding
    if kind != "allgather" or (job.memory.fp8 == "none" and not padding):
        return None
    align = 32 if job.memory.fp8 == "mxfp8" else 16
    return f"dispatcher allgather with fp8 {job.memory.fp8}: it can't pad an expert's tokens to {align}"


# --- optimizer --------------------------------------------------------------------------------------------------------


def precision_aware(job: Job) -> list[Changes]:
    """The precision-aware optimizer with what it needs."""
    wanted = {
        "memory.precision_aware_optimizer": (job.memory.precision_aware_optimizer, True),
        "memory.distributed_optimizer": (job.memory.distributed_optimizer, True),
        "train.switches.optimizer": (train_of(job).switches.optimizer, "adam"),
    }
    return [tuple((path, new) for path, (old, new) in wanted.items() if old != new)]


@rule(
    "optimizer-offload",
    source=ARGUMENTS,
    needs="megatron",
    knobs=(precision_aware, "memory.optimizer_offload_fraction"),
)
def optimizer_offload(job: Job) -> str | None:
    """Keeping optimizer states in host memory needs the precision-aware optimizer, where Megatron's own arguments are
    validated: verl builds the optimizer without them."""
    fraction = job.memory.optimizer_offload_fraction
    if fraction == 0 or job.memory.precision_aware_optimizer or train_of(job).switches.implementation == "verl":
        return None
    return f"optimizer_offload_fraction {fraction} without precision_aware_optimizer"


@rule(
    "offload-fraction", source=f"{ARGUMENTS} (optimizer-offload-fraction)", knobs=("memory.optimizer_offload_fraction",)
)
def offload_fraction(job: Job) -> str | None:
    """The share of optimizer states in host memory is from 0 to 1."""
    fraction = job.memory.optimizer_offload_fraction
    return None if 0 <= fraction <= 1 else f"optimizer_offload_fraction {fraction} is not from 0 to 1"


@rule(
    "precision-aware",
    source=ARGUMENTS,
    needs="megatron",
    knobs=(precision_aware, "memory.precision_aware_optimizer"),
)
def precision_aware_needs(job: Job) -> str | None:
    """The precision-aware optimizer is adam, and distributed."""
    optimizer = train_of(job).switches.optimizer
    if not job.memory.precision_aware_optimizer or (optimizer == "adam" and job.memory.distributed_optimizer):
        return None
    distributed = "on" if job.memory.distributed_optimizer else "off"
    return f"precision_aware_optimizer with optimizer {optimizer}, distributed_optimizer {distributed}"


def plain_states(job: Job) -> list[Changes]:
    """Every state in float32."""
    names = ("master_dtype", "moment_dtype")
    return [tuple((f"memory.{name}", "fp32") for name in names if getattr(job.memory, name) != "fp32")]


@rule(
    "state-dtypes",
    source=ARGUMENTS,
    needs="megatron",
    knobs=(precision_aware, plain_states),
)
def state_dtypes(job: Job) -> str | None:
    """Without the precision-aware optimizer, master weights and both moments are float32."""
    memory = job.memory
    wrong = [
        f"{name} {getattr(memory, name)}"
        for name in ("master_dtype", "moment_dtype")
        if getattr(memory, name) != "fp32"
    ]
    return (
        f"{', '.join(wrong)} without precision_aware_optimizer"
        if wrong and not memory.precision_aware_optimizer
        else None
    )


@rule("fp8-gather-offload", source=ARGUMENTS, needs="megatron", knobs=("memory.fp8_param_gather", "memory.fp8"))
def fp8_gather_offload(job: Job) -> str | None:
    """Gathering parameters in fp8 with the optimizer in host memory exists for the delayed recipe only."""
    memory = job.memory
    if not memory.fp8_param_gather or memory.optimizer_offload_fraction == 0 or memory.fp8 == "delayed":
        return None
    fraction = memory.optimizer_offload_fraction
    return f"fp8_param_gather with optimizer_offload_fraction {fraction} and fp8 {memory.fp8}: delayed only"


@rule("fp8-gather", source=ARGUMENTS, needs="megatron", knobs=("memory.fp8_param_gather",))
def fp8_gather(job: Job) -> str | None:
    """Gathering parameters in fp8 needs fp8 training."""
    return "fp8_param_gather with fp8 none" if job.memory.fp8_param_gather and job.memory.fp8 == "none" else None


def overlap_both(job: Job) -> list[Changes]:
    """The distributed optimizer, and gradients reduced while the backward runs."""
    names = ("distributed_optimizer", "overlap_grad_reduce")
    return [tuple((f"memory.{name}", True) for name in names if not getattr(job.memory, name))]


@rule("param-gather-overlap", source=ARGUMENTS, needs="megatron", knobs=(overlap_both, "memory.overlap_param_gather"))
def param_gather_overlap(job: Job) -> str | None:
    """Overlapping the gather of parameters needs the distributed optimizer and overlapped gradient reduction."""
    memory = job.memory
    missing = [name for name in ("distributed_optimizer", "overlap_grad_reduce") if not getattr(memory, name)]
    return f"overlap_param_gather without {' and '.join(missing)}" if memory.overlap_param_gather and missing else None


# --- recomputation and offload ----------------------------------------------------------------------------------------


def recompute_spelled(job: Job) -> list[Changes]:
    """Full recomputation of every layer, or none of its settings."""
    if job.memory.recompute == "full":
        method = job.memory.recompute_method or "uniform"
        wanted = {"recompute_method": method, "recompute_num_layers": job.memory.recompute_num_layers or 1}
    else:
        wanted = {"recompute_method": None, "recompute_num_layers": None}
    return [tuple((f"memory.{name}", value) for name, value in wanted.items() if getattr(job.memory, name) != value)]


@rule("recompute-settings", source=CONFIG, needs="megatron", knobs=(recompute_spelled,))
def recompute_settings(job: Job) -> str | None:
    """Full recomputation needs a method and a number of layers; other modes have neither."""
    memory = job.memory
    given = (memory.recompute_method is not None, memory.recompute_num_layers is not None)
    if given == ((True, True) if memory.recompute == "full" else (False, False)):
        return None
    layers = "unset" if memory.recompute_num_layers is None else memory.recompute_num_layers
    return f"recompute {memory.recompute} with method {memory.recompute_method or 'unset'}, num_layers {layers}"


@rule(
    "activation-offload",
    source=CONFIG,
    needs="megatron",
    knobs=("memory.offload_activations",),
)
def activation_offload(job: Job) -> str | None:
    """Activations go to host memory only without pipeline and recomputation."""
    train, memory = train_of(job), job.memory
    if not memory.offload_activations or (train.pp == 1 and memory.recompute == "none"):
        return None
    return f"offload_activations with pp {train.pp} and recompute {memory.recompute}: pp 1 and none"


@rule(
    "offload-apart",
    severity="warning",
    source="miles miles/utils/arguments.py: --offload-train",
    needs="train engine",
    knobs=("memory.offload_weights",),
)
def offload_apart(job: Job) -> str | None:
    """Apart from the engines, the trainer has its devices for itself: offloading its weights only costs."""
    return (
        "offload_weights with trainer and engines apart" if job.memory.offload_weights and not job.colocated else None
    )


def _rematerialisation_obstacles(job: Job) -> dict[str, bool]:
    memory = job.memory
    return {
        "trainer and engines apart": not job.colocated,
        "offload_weights off": not memory.offload_weights,
        "offload_target disk": memory.offload_target == "disk",
        "distributed_optimizer off": not memory.distributed_optimizer,
        "overlap_param_gather": memory.overlap_param_gather,
        "precision_aware_optimizer on the device": memory.precision_aware_optimizer
        and memory.optimizer_offload_fraction == 0,
    }


@rule(
    "rematerialised-weights",
    source="miles miles/utils/arguments.py: validate of --rematerialize-param-from-master-weight",
    needs="megatron",
    knobs=("memory.offload_weights", "memory.overlap_param_gather", "memory.rematerialise_weights"),
)
def rematerialised_weights(job: Job) -> str | None:
    """Weights are made again from float32 masters only where those stand alone: colocated, offloaded to the CPU,
    distributed optimizer, no overlapped gather, and precision-aware only with the states in host memory."""
    there = [text for text, present in _rematerialisation_obstacles(job).items() if present]
    return f"rematerialise_weights with {', '.join(there)}" if job.memory.rematerialise_weights and there else None


def states_on_disk(job: Job) -> list[Changes]:
    """No other place for the states than the disk."""
    memory = job.memory
    wanted = {"optimizer_offload_fraction": 0.0, "precision_aware_optimizer": False, "distributed_optimizer": True}
    if memory.offload_weights:
        wanted["offload_target"] = "disk"
    return [tuple((f"memory.{name}", value) for name, value in wanted.items() if getattr(memory, name) != value)]


@rule(
    "streamed-optimizer",
    source="miles miles/utils/arguments.py: miles_validate_args (--stream-optimizer-state-to-disk)",
    needs="megatron",
    knobs=(states_on_disk, "memory.stream_optimizer"),
)
def streamed_optimizer(job: Job) -> str | None:
    """Optimizer states that live on disk exclude those in host memory and the precision-aware optimizer, need the
    distributed one, and weights that go to disk too where they are offloaded."""
    memory = job.memory
    obstacles = {
        f"optimizer_offload_fraction {memory.optimizer_offload_fraction}": memory.optimizer_offload_fraction > 0,
        "precision_aware_optimizer": memory.precision_aware_optimizer,
        "distributed_optimizer off": not memory.distributed_optimizer,
        "offload_target cpu": memory.offload_weights and memory.offload_target == "cpu",
    }
    there = [text for text, present in obstacles.items() if present]
    return f"stream_optimizer with {', '.join(there)}" if memory.stream_optimizer and there else None


@rule(
    "offload-target",
    source="miles miles/utils/arguments.py: miles_validate_args",
    needs="megatron",
    knobs=("memory.offload_weights", "memory.offload_target"),
)
def offload_target(job: Job) -> str | None:
    """A target for offloaded weights needs weights that are offloaded."""
    disk = job.memory.offload_target == "disk" and not job.memory.offload_weights
    return "offload_target disk with offload_weights off" if disk else None
