"""What a trainer of Megatron-Core keeps on one device of each pipeline stage, and what each phase adds.

    weights      bf16 2 (fp8 kept by the parameters: 1 by rows and 1 by columns)       a local parameter
    gradients    the main gradient buffer, fp32 4 or bf16 2
    optimizer    master, m, v: 12 undistributed; distributed 12 / d, d = dp · cp for dense, the expert grid's own
                 data-parallel size for experts; a share φ of it lies in host memory, with a pinned fp32 gradient

Source: Megatron-LM optimizer/distrib_optimizer.py, optimizer/cpu_offloading/hybrid_optimizer.py (whole parameters until
φ is reached: it overshoots), Transformer Engine FusedAdam (``store_param_remainders``: a bf16 weight and 2 bytes are
its fp32 master). Buckets are padded to lcm(d, 128) elements, which is not counted.
"""

from __future__ import annotations

from dataclasses import replace

from lockstep.topology.activations import (
    ROUTING_IMBALANCE,
    checkpoint_activations,
    in_flight,
    layer_activations,
    logits_bytes,
)
from lockstep.topology.cache import BYTES
from lockstep.topology.memory_records import MemoryItem, Owner, Phase, StageMemory, gigabytes
from lockstep.topology.parameters import RankParameters, rank_parameters
from lockstep.topology.records import Batch, Job, TrainLayout, TrainMemory

ASSUMED_TOKENS = 4096
"""Tokens of a micro-batch where the job does not say."""

CONTEXT_BYTES = 500_000_000
"""CUDA context and loaded kernels of one process: 0.3 to 0.5 GB."""

COMMUNICATOR_BYTES = 7_000_000_000 // 3
"""What NCCL takes for each of a Megatron trainer's axes of more than one rank: a third of what was measured with three
of them, tp 2, pp 2, dp 2 on eight H100 (verl issues 6408, 6266)."""

EXPERT_COMMUNICATOR_BYTES = 2_500_000_000
"""What the expert grid adds, by the same measurement."""

SMALLEST_COMMUNICATOR = 544_000_000
"""The least that one communicator was seen to take (NVIDIA/nccl issue 964)."""

SMALLEST_RCCL_COMMUNICATOR = (65 << 30) // 100
"""The same of RCCL (LUMI guide issue 111)."""


def data_parallel(job: Job) -> tuple[int, int]:
    """(dp · cp, data-parallel size of the expert grid): over how many ranks optimizer states are spread."""
    layout = job.train or TrainLayout()
    expert_tp = layout.etp if layout.etp is not None else layout.tp
    return (
        max(1, job.train_world // (layout.tp * layout.pp)),
        max(1, job.train_world // (expert_tp * layout.ep * layout.pp)),
    )


def stage_memory(job: Job, stages: tuple[tuple[int, ...], ...]) -> tuple[StageMemory, ...]:
    """Static memory of one device of every pipeline stage; ``stages`` are their decoder layers."""
    layout = job.train or TrainLayout()
    found = []
    for stage, layers in enumerate(stages):
        ends = {"first_stage": stage == 0, "last_stage": stage == len(stages) - 1}
        held = rank_parameters(job.model, layout, layers, **ends)
        states, host = _optimizer(held, job)
        spread = fsdp_shards(layout)
        weights = round(_of_a_rank(held, job, shared="params" in spread) * BYTES[job.memory.weight_dtype])
        gradients = round(_of_a_rank(held, job, shared="grads" in spread) * BYTES[job.memory.grad_dtype])
        found.append(StageMemory(stage, layers, weights, gradients, states, host))
    return tuple(found)


def fsdp_shards(layout: TrainLayout) -> str:
    """What Megatron's FSDP or PyTorch's spreads over data-parallel ranks, of "optim_grads_params"; "" without one."""
    switches = layout.switches
    if switches.megatron_fsdp:
        return switches.fsdp_sharding or "optim_grads_params"
    return "optim_grads_params" if switches.torch_fsdp2 else ""


def _of_a_rank(held: RankParameters, job: Job, *, shared: bool) -> float:
    """Parameters of a rank, or its share of those of all data-parallel ranks."""
    dense, expert = data_parallel(job) if shared else (1, 1)
    return held.dense / dense + held.experts / expert


def static_items(job: Job, held: StageMemory) -> list[MemoryItem]:
    """Weights, gradients and optimizer states as items."""
    dense, expert = data_parallel(job)
    ranks, shards = f"over dp·cp {dense}, experts over {expert}", fsdp_shards(job.train or TrainLayout())
    spread = ranks if job.memory.distributed_optimizer or "optim" in shards else "not distributed"
    weights_over, gradients_over = (f" {ranks}" if part in shards else "" for part in ("params", "grads"))
    share = job.memory.optimizer_offload_fraction
    off = f"; {share:.0%} of them in host memory" if share else ""
    bits = job.memory
    items = [
        MemoryItem("weights", held.weights, "counted", f"{BYTES[bits.weight_dtype]} bytes a parameter{weights_over}"),
        MemoryItem(
            "gradients",
            held.gradients,
            "counted",
            f"main buffer, {BYTES[bits.grad_dtype]} bytes a parameter{gradients_over}",
        ),
        MemoryItem(
            "optimizer states", held.optimizer, "counted", f"{optimizer_bytes(bits)} bytes a parameter {spread}{off}"
        ),
    ]
    if bits.fp8 != "none" and not bits.fp8_param_gather:
        copies = held.weights // BYTES[bits.weight_dtype] * 2
        note = "rows and columns, kept over a step's micro-batches; embeddings and norms counted along"
        source = "Transformer Engine module/base.py: get_weight_workspace"
        items.append(MemoryItem("fp8 copies of weights", copies, "assumed", note, source))
    return items


def phase_items(job: Job, held: StageMemory, num_stages: int, phase: Phase) -> list[MemoryItem]:
    """What ``phase`` adds to the static memory of this stage."""
    layout = job.train or TrainLayout()
    tokens, stated = scoring_tokens(job) if phase == "score" else micro_batch_tokens(job)
    basis = "counted" if stated else "assumed"
    chunk = job.batch.logprob_chunk_tokens if job.batch else None
    last = held.stage == num_stages - 1
    items = []
    if phase == "train":
        items.append(_activations(job, held, tokens, basis))
        if job.memory.stream_optimizer:
            items.append(_streamed(job, held))
        if shards := fsdp_shards(layout):
            items.append(_gathered(job, held, shards))
    elif phase == "score":
        working = max((_layer(job, layer, tokens, working=True) for layer in held.layers), default=0)
        items.append(MemoryItem("activations", working, basis, f"one layer of {tokens} tokens, no gradient"))
    if phase in ("train", "score") and last:
        size = logits_bytes(job.model, tokens, layout, chunk=chunk, gradient=phase == "train")
        note = f"{tokens} tokens, vocabulary / {layout.tp}" + (f", float32 for {chunk} at once" if chunk else "")
        items.append(MemoryItem("logits and loss", size, basis, note))
    if phase in ("train", "score") and num_stages > 1:
        size = 4 * checkpoint_activations(job.model, tokens, layout)
        items.append(MemoryItem("pipeline buffers", size, "counted", "two states received, two sent"))
    return items


def overhead_items(job: Job) -> list[MemoryItem]:
    """Context and communicators, which stay whatever the trainer offloads."""
    items = [context_item(job)]
    layout = job.train or TrainLayout()
    data = job.train_world // max(1, layout.tp * layout.pp * layout.cp)
    axes = sum(size > 1 for size in (layout.tp, layout.pp, layout.cp, data))
    experts = job.model.is_moe and layout.ep > 1
    if axes:
        note = f"{axes} axes{' and the expert grid' if experts else ''}, each as at tp 2, pp 2, dp 2 on eight H100"
        size = axes * COMMUNICATOR_BYTES + experts * EXPERT_COMMUNICATOR_BYTES
        rocm = job.hardware.vendor == "amd"
        slack = size - (axes + experts) * (SMALLEST_RCCL_COMMUNICATOR if rocm else SMALLEST_COMMUNICATOR)
        source = "verl issues 6408, 6266"
        items.append(MemoryItem("communicators", size, "assumed" if rocm else "measured", note, source, slack=slack))
    return items


def context_item(job: Job, owner: Owner = "trainer") -> MemoryItem:
    """What the driver and loaded kernels take in one process: measured with CUDA, and nowhere published for HIP."""
    if job.hardware.vendor == "amd":
        return MemoryItem("device context", CONTEXT_BYTES, "assumed", "one process, as much as CUDA's", owner=owner)
    return MemoryItem("device context", CONTEXT_BYTES, "measured", "one process", owner=owner)


def optimizer_bytes(memory: TrainMemory) -> int:
    """Bytes a parameter of master and moments on the device."""
    if memory.optimizer_offload_fraction or not memory.precision_aware_optimizer:
        return 12
    remainders = memory.master_dtype == "fp32" and memory.weight_dtype == "bf16"
    return (2 if remainders else BYTES[memory.master_dtype]) + 2 * BYTES[memory.moment_dtype]


def micro_batch_tokens(job: Job, *, samples: int | None = None) -> tuple[int, bool]:
    """Tokens of the largest micro-batch on one context-parallel rank, and whether the job states them.

    A budget holds for packed samples, of which a rank has no more than its share of ``samples`` (those of an optimizer
    step), and a sample that is longer goes alone. Megatron's samples that are padded instead come ``micro_batch`` at a
    time, each as long as the longest, whatever the budget is.

    Source: miles training_utils/data.py: get_data_iterator (first fit), arguments.py (no budget with bshd).
    """
    batch, layout = job.batch, job.train or TrainLayout()
    length = sequence_tokens(job)
    shares = layout.cp * layout.ulysses  # ranks that share a sequence
    alone = -(-length * ((batch.micro_batch if batch else None) or 1) // shares) if length is not None else None
    budget = batch.max_tokens_per_gpu if batch else None
    if budget and (batch is None or batch.packing or layout.backend == "fsdp" or alone is None):
        if batch is None or length is None:
            return budget, True
        held = -(-(samples or _step_samples(batch)) // _replicas(job)) * length
        held = -(-held // (batch.pad_multiple or 1)) * (batch.pad_multiple or 1)
        return max(min(budget, -(-held // shares)), -(-length // shares)), True
    return (alone, True) if alone is not None else (ASSUMED_TOKENS, False)


def scoring_tokens(job: Job) -> tuple[int, bool]:
    """The same of a forward alone, which may have its own budget or size."""
    batch = job.batch
    if batch is None:
        return micro_batch_tokens(job)
    samples = batch.num_prompts * batch.group_size  # all of a rollout batch at once
    if batch.score_tokens_per_gpu is None and batch.score_micro_batch is None:
        return micro_batch_tokens(job, samples=samples)
    own = replace(batch, max_tokens_per_gpu=batch.score_tokens_per_gpu, micro_batch=batch.score_micro_batch)
    return micro_batch_tokens(replace(job, batch=own), samples=samples)


def sequence_tokens(job: Job) -> int | None:
    """Longest prompt and response together; None where the job does not say."""
    batch = job.batch
    if batch is None or batch.response_tokens is None:
        return None
    return (batch.prompt_tokens or 0) + batch.response_tokens


def num_micro_batches(job: Job) -> int | None:
    """Micro-batches of one optimizer step on one data-parallel rank; None where the job does not say."""
    batch, length = job.batch, sequence_tokens(job)
    if batch is None or length is None:
        return None
    layout = job.train or TrainLayout()
    shares = layout.cp * layout.ulysses
    tokens, _ = micro_batch_tokens(job)
    return max(1, -(-_step_samples(batch) * length // (_replicas(job) * shares * tokens)))


def _step_samples(batch: Batch) -> int:
    """Samples of one optimizer step."""
    return batch.global_batch or -(-batch.num_prompts * batch.group_size // batch.optimizer_steps)


def _replicas(job: Job) -> int:
    """Groups of ranks that each hold samples of their own."""
    layout = job.train or TrainLayout()
    return max(1, job.train_world // (layout.tp * layout.pp * layout.cp * layout.ulysses))


def _gathered(job: Job, held: StageMemory, shards: str) -> MemoryItem:
    """Layers of which FSDP has the whole weights or gradients at once: one in use, one on its way."""
    layout, bits = job.train or TrainLayout(), job.memory
    layers = (
        rank_parameters(job.model, layout, (layer,), first_stage=False, last_stage=False) for layer in held.layers
    )
    widths = ("params" in shards) * BYTES[bits.weight_dtype] + ("grads" in shards) * BYTES[bits.grad_dtype]
    size = round(2 * max((layer.total for layer in layers), default=0) * widths)
    return MemoryItem("gathered layers", size, "assumed", f"two layers whole, {widths} bytes a parameter")


def _streamed(job: Job, held: StageMemory) -> MemoryItem:
    """States that pass through the device, two layers' at once: one being used, one on its way."""
    parameters = held.weights // BYTES[job.memory.weight_dtype] // max(1, len(held.layers))
    note = "two layers at once, the rest on disk; not spread over data-parallel ranks, an upper bound"
    return MemoryItem("streamed optimizer states", 2 * 12 * parameters, "assumed", note)


def _activations(job: Job, held: StageMemory, tokens: int, basis: str) -> MemoryItem:
    layout, memory = job.train or TrainLayout(), job.memory
    copies = in_flight(layout, held.stage, num_micro_batches(job))
    per_layer = [_layer(job, layer, tokens) for layer in held.layers]
    balanced = [_layer(job, layer, tokens, imbalance=1.0) for layer in held.layers]
    kept = checkpoint_activations(job.model, tokens, layout)
    slack = 0
    if memory.recompute == "full" and per_layer:
        every = memory.recompute_num_layers or 1
        alive = [_layer(job, layer, tokens, working=True) for layer in held.layers]
        if memory.recompute_method == "block":
            again = min(every, len(per_layer))
            one_batch = again * kept + sum(per_layer[again:])
            working = max(alive[:again], default=0)
        else:
            one_batch = -(-len(per_layer) // every) * kept
            working = max(sum(alive[start : start + every]) for start in range(0, len(alive), every))
        note = f"{copies:g} micro-batches of {tokens} tokens, layers' inputs; working set {gigabytes(working)}"
        size = round(copies * one_batch) + working
    else:
        note = f"{copies:g} micro-batches of {tokens} tokens, {len(per_layer)} layers, nothing recomputed"
        size = round(copies * sum(per_layer))
        slack = size - round(copies * sum(balanced))
    if memory.offload_activations:
        size, note = max(per_layer, default=0) * 2, f"two layers of {tokens} tokens, the rest in host memory"
        slack = 0
    if slack:
        note = f"{note}; experts' rows {ROUTING_IMBALANCE:g} × even"
    return MemoryItem("activations", size, "counted" if basis == "counted" else "assumed", note, slack=slack)


def _layer(job: Job, layer: int, tokens: int, imbalance: float = ROUTING_IMBALANCE, *, working: bool = False) -> int:
    layout, fp8 = job.train or TrainLayout(), job.memory.fp8 != "none"
    return layer_activations(job.model, layer, tokens, layout, fp8=fp8, imbalance=imbalance, working=working)


def _optimizer(held: RankParameters, job: Job) -> tuple[int, int]:
    """Bytes of optimizer states on the device and in host memory. Streamed ones live on a disk."""
    memory = job.memory
    distributed = memory.distributed_optimizer or "optim" in fsdp_shards(job.train or TrainLayout())
    parameters = _of_a_rank(held, job, shared=distributed)
    share = memory.optimizer_offload_fraction
    if memory.stream_optimizer:
        return 0, 0
    if share:
        # The host's Adam keeps float32 whatever the device's would: master, m, v and a pinned gradient.
        return round(12 * (1 - share) * parameters), round(16 * share * parameters)
    return round(optimizer_bytes(memory) * parameters), 0
