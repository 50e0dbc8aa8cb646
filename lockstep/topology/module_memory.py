"""What Lockstep's own trainer and embedded engine allocate, phase by phase.

    trainer, one device    live weights b, float32 masters 4 (none where the live ones are float32), moments 4 + 4;
                           float32 gradients 4 from the first backward to the optimizer's step
    micro-batch            activations of every layer (module_activations.py), then the head in chunks
    several devices        FSDP2: float32 shards of weight, gradient, m and v, 16 / N; whole groups in bf16 around them

The peak of a training step is the largest of three moments: the head's backward, when all activations are there; the
first layer's backward, when all gradients are; the optimizer's step. Source: lockstep/train/fsdp.py, optimizer.py,
token_logprobs.py; PyTorch torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
"""

from __future__ import annotations

from lockstep.topology.cache import BYTES
from lockstep.topology.memory_records import MemoryItem, Phase, StageMemory, gigabytes
from lockstep.topology.module_activations import (
    head_working_set,
    module_checkpoint,
    module_layer_activations,
    module_outer_activations,
    module_working_set,
)
from lockstep.topology.parameters import count_parameters, layer_parameters
from lockstep.topology.records import Job, ModelShape, TrainLayout
from lockstep.topology.trainer_memory import context_item, micro_batch_tokens, sequence_tokens

PACKED_ROW_TOKENS = 128
"""Rows of several sequences are filled to this length at least, and to four times the longest sequence."""

DEFAULT_CHUNK = 512
"""trainer.logprob_chunk_tokens."""

CPU_BLOCK = 1 << 22
"""Float32 elements of one softmax block on a CPU; a GPU takes a chunk whole."""

WORKSPACE_BYTES = 100_000_000
"""cuBLAS workspaces of the forward's and the backward's thread, which torch's allocator holds."""

UNPACKED = frozenset({"deepseek_v4", "inkling_text"})
"""Architectures whose sequences are padded at the right. They attend in parts over the row's columns."""


def module_stage(job: Job) -> StageMemory:
    """Static memory of one device: shards over all ranks of a replica, everything on a single device."""
    shape, memory = job.model, job.memory
    counts = count_parameters(shape)
    live = BYTES[memory.weight_dtype]
    trained = counts.total - counts.indexer
    among = _shards(job)
    layers = tuple(range(shape.num_layers))
    if among > 1:
        return StageMemory(0, layers, 4 * counts.total // among, 4 * trained // among, 8 * trained // among, 0)
    # A live weight that has the master's precision, or float32, is its own master.
    masters = 0 if live == 4 or memory.master_dtype == memory.weight_dtype else BYTES[memory.master_dtype]
    moments = 2 * BYTES[memory.moment_dtype]
    return StageMemory(0, layers, live * counts.total, 4 * trained, (masters + moments) * trained, 0)


def module_static_items(job: Job, held: StageMemory) -> list[MemoryItem]:
    """Weights and optimizer states, which lie there in every phase."""
    among = _shards(job)
    spread = f"; sharded over {among}" if among > 1 else ""
    states = "masters and both moments, of what is trained"
    return [
        MemoryItem("weights", held.weights, "counted", f"{gigabytes(held.weights)} of live weights{spread}"),
        MemoryItem("optimizer states", held.optimizer, "counted", f"{states}{spread}"),
    ]


def module_overhead_items(job: Job) -> list[MemoryItem]:
    """What the process holds beside tensors."""
    items = [
        context_item(job),
        MemoryItem("workspaces", WORKSPACE_BYTES, "assumed", "cuBLAS, two threads"),
    ]
    return items if job.hardware.vendor != "cpu" else []


def module_phase_items(job: Job, held: StageMemory, phase: Phase) -> list[MemoryItem]:
    """What ``phase`` adds: see the head of this file."""
    if phase == "train":
        return max(_training_moments(job, held), key=lambda items: sum(item.num_bytes for item in items))
    if phase == "score":
        return [*_forward_without_gradient(job), *_gathered(job, gradient=False)]
    return []


def micro_batch(job: Job) -> tuple[int, int | None]:
    """(positions of one forward, columns of its rows: None where attention is causal and needs no mask)."""
    budget, _ = micro_batch_tokens(job)
    length, whole = sequence_tokens(job), step_positions(job)
    if whole is not None:
        budget = min(budget, whole)
    if job.model.model_type in UNPACKED:
        return budget, min(length or budget, budget)
    if not _packs(job):
        return budget, None
    row = max(PACKED_ROW_TOKENS, 4 * length) if length is not None else budget
    return budget, min(row, budget)


def step_positions(job: Job) -> int | None:
    """Positions that one optimizer step runs through the model: where sequences are packed, samples of a prompt share
    it; the last token of a sequence is not fed. None where the job does not say."""
    batch, length = job.batch, sequence_tokens(job)
    if batch is None or length is None or batch.response_tokens is None:
        return None
    prompts = -(-batch.num_prompts // batch.optimizer_steps)
    if _packs(job):
        return prompts * ((batch.prompt_tokens or 0) + batch.group_size * (batch.response_tokens - 1))
    return prompts * batch.group_size * (length - 1)


def _packs(job: Job) -> bool:
    return job.model.model_type not in UNPACKED and (job.batch is None or job.batch.packing)


def _training_moments(job: Job, held: StageMemory) -> list[list[MemoryItem]]:
    """The three candidates for the peak, each as items."""
    shape, (tokens, row) = job.model, micro_batch(job)
    width = BYTES[job.memory.weight_dtype]
    layers = [module_layer_activations(shape, layer, tokens, row=row, width=width) for layer in range(shape.num_layers)]
    outer = module_outer_activations(shape, tokens, width=width)
    working = module_working_set(shape, tokens, width=width, gradient=True) + width * _largest_parameter(shape)
    kept, first = sum(layers), layers[0]
    note = f"{tokens} positions, {len(layers)} layers"
    if job.memory.recompute == "full":
        checkpoint = module_checkpoint(shape, tokens, width=width)
        kept, first, working = len(layers) * checkpoint, checkpoint, working + max(layers)
        note += ", their inputs"
    basis = "assumed" if shape.attention == "deepseek_v4" else "counted"
    head = _head(job, tokens, gradient=True)
    gradient, gathered = held.gradients, _gathered(job, gradient=True)
    # With one micro-batch the gradients of the layers are not there yet when the head's backward runs.
    whole = step_positions(job)
    several = whole is None or whole > tokens
    early = gradient if several else 4 * shape.vocab * shape.hidden // _shards(job)
    # A tied embedding's gradient waits in the head's dtype until the embedding's own is there.
    tied = width * shape.vocab * shape.hidden if shape.tied_embeddings else 0

    def moment(activations: int, gradients: int, name: str, transient: int) -> list[MemoryItem]:
        return [
            MemoryItem("gradients", gradients, "counted", "float32 sums over micro-batches"),
            MemoryItem("activations", activations, basis, note),
            MemoryItem(name, transient, "counted" if name == "logits and head" else "assumed", _TRANSIENT[name]),
            *gathered,
        ]

    moments = [
        moment(kept + outer, early, "logits and head", head),
        moment(kept + outer, early, "working set", working + tied),
        moment(first + outer, gradient, "working set", working + tied),
    ]
    return [*moments, [MemoryItem("gradients", gradient, "counted", "the optimizer's step")]]


_TRANSIENT = {
    "logits and head": "one chunk of logits, its float32 block, the head's gradient",
    "working set": "one layer's backward and the largest parameter's gradient before it is added up",
}


def _forward_without_gradient(job: Job) -> list[MemoryItem]:
    shape, (tokens, row) = job.model, micro_batch(job)
    width = BYTES[job.memory.weight_dtype]
    working = module_working_set(shape, tokens, width=width, gradient=False)
    masks = 3 * tokens * row if row else 0
    head = _head(job, tokens, gradient=False)
    head += 2 * tokens * shape.hidden * width
    if working + masks > head:
        return [MemoryItem("working set", working + masks, "assumed", f"one layer's forward of {tokens} positions")]
    return [MemoryItem("logits and head", head + masks, "counted", "one chunk of logits and its float32 block")]


def _gathered(job: Job, *, gradient: bool) -> list[MemoryItem]:
    """FSDP2's whole groups in bf16: the current one, its gather buffer and the next; in a backward also gradients."""
    if _shards(job) == 1:
        return []
    largest = max(layer_parameters(job.model, layer).total for layer in range(job.model.num_layers))
    largest = max(largest, job.model.vocab * job.model.hidden)
    factor = (2 * 2 + 2 + 2 * 4) if gradient else 3 * 2
    note = f"{factor} bytes for each parameter of the largest wrapped group, an upper bound"
    return [MemoryItem("gathered weights", factor * largest, "assumed", note, "torch _fsdp_param_group.py")]


def _largest_parameter(shape: ModelShape) -> int:
    """Elements of the largest tensor whose gradient passes through: the embedding, or a stack of experts."""
    stack = 2 * shape.num_experts * shape.hidden * shape.moe_ffn
    return max(stack, shape.hidden * shape.ffn, 0 if shape.tied_embeddings else shape.vocab * shape.hidden)


def _head(job: Job, tokens: int, *, gradient: bool) -> int:
    chunk = (job.batch.logprob_chunk_tokens if job.batch else None) or DEFAULT_CHUNK
    width, block = BYTES[job.memory.weight_dtype], CPU_BLOCK if job.hardware.vendor == "cpu" else None
    return head_working_set(job.model, tokens, chunk, width=width, gradient=gradient, block_elements=block)


def _shards(job: Job) -> int:
    layout = job.train or TrainLayout()
    return max(1, job.train_world // (layout.replicate or 1))
