"""Rules of context parallelism and sequence lengths in Megatron, and of recorded choices that are replayed."""

from __future__ import annotations

import math

from lockstep.topology.records import Job
from lockstep.topology.rules import Changes, batch_of, rule, train_of
from lockstep.topology.rules_megatron import ARGUMENTS, CONFIG, PARALLEL_STATE

TE = (
    "TransformerEngine transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py: "
    "attn_forward_func_with_cp"
)
_KINDS = ("p2p", "a2a", "all_gather", "a2a+p2p")


def kinds(job: Job) -> list[str]:
    """Communication of each entry: one for all layers, or one per layer. Megatron's default is p2p."""
    return (train_of(job).cp_comm_type or "p2p").replace(",", " ").split()


def _uses(job: Job) -> set[str]:
    return set(kinds(job)) if train_of(job).cp > 1 else set()


@rule("cp-comm-type", source=f"{CONFIG}; {TE}", needs="megatron", knobs=("train.cp_comm_type",))
def cp_comm_type(job: Job) -> str | None:
    """Communication of context parallelism is p2p, a2a, all_gather (so spelled) or a2a+p2p: one for all layers, or one
    a layer."""
    unknown = sorted(set(kinds(job)) - set(_KINDS))
    if unknown:
        return f"cp_comm_type {', '.join(unknown)}: it is {', '.join(_KINDS)}"
    if len(kinds(job)) not in (1, job.model.num_layers):
        return f"{len(kinds(job))} cp_comm_type entries for {job.model.num_layers} layers: one for all, or one a layer"
    return None


@rule("cp-heads", source=TE, needs="megatron", knobs=("train.cp", "train.cp_comm_type"))
def cp_heads(job: Job) -> str | None:
    """a2a spreads a rank's heads over the context-parallel ranks: heads / tp and key/value heads / tp divide by cp."""
    train, model = train_of(job), job.model
    if "a2a" not in _uses(job):
        return None
    heads, kv_heads = max(1, model.num_heads // train.tp), max(1, model.num_kv_heads // train.tp)
    if heads % train.cp == 0 and kv_heads % train.cp == 0:
        return None
    return f"cp {train.cp} with a2a: heads / tp = {heads} and key/value heads / tp = {kv_heads} must divide by it"


def hierarchies(job: Job) -> list[Changes]:
    """Two levels whose product is cp, the inner one as large as a node allows."""
    cp = train_of(job).cp
    inner = [size for size in range(2, cp) if cp % size == 0]
    return [(("train.switches.cp_hierarchy", (size, cp // size)),) for size in sorted(inner, reverse=True)]


@rule(
    "cp-hierarchy",
    source=f"{ARGUMENTS}; {PARALLEL_STATE}",
    needs="megatron",
    knobs=(hierarchies, "train.cp_comm_type"),
)
def cp_hierarchy(job: Job) -> str | None:
    """a2a+p2p needs its levels' sizes, whose product is cp."""
    sizes, cp = train_of(job).switches.cp_hierarchy, train_of(job).cp
    if "a2a+p2p" not in _uses(job) or (sizes and math.prod(sizes) == cp):
        return None
    given = f"levels {' · '.join(map(str, sizes))} = {math.prod(sizes)}" if sizes else "no levels (cp_hierarchy)"
    return f"a2a+p2p with {given} for cp {cp}"


@rule("cp-window", source=TE, needs="megatron", knobs=("train.cp_comm_type", "train.cp"))
def cp_window(job: Job) -> str | None:
    """Sliding windows under context parallelism need a2a or all_gather."""
    model = job.model
    wrong = _uses(job) - {"a2a", "all_gather"}
    if not model.sliding_window or model.attention != "gqa" or not wrong:
        return None
    return f"a sliding window of {model.sliding_window} with cp {train_of(job).cp} and {', '.join(sorted(wrong))}"


@rule(
    "cp-sinks",
    source=TE,
    needs="megatron",
    knobs=("train.cp_comm_type", "train.switches.fused_attention", "train.cp"),
)
def cp_sinks(job: Job) -> str | None:
    """Attention sinks under context parallelism need a2a and fused attention."""
    if not job.model.attention_sinks or not _uses(job):
        return None
    wrong = _uses(job) - {"a2a"}
    unfused = train_of(job).switches.fused_attention is False
    if not wrong and not unfused:
        return None
    problem = ", ".join([*sorted(wrong), *(["fused_attention off"] if unfused else [])])
    return f"attention sinks with cp {train_of(job).cp} and {problem}"


@rule(
    "cp-sparse",
    source=f"{CONFIG} (DSAttention); miles miles/utils/arguments.py: --allgather-cp",
    needs="megatron",
    knobs=("train.cp_comm_type", "train.cp_partition", "train.cp"),
)
def cp_sparse(job: Job) -> str | None:
    """An indexer chooses among all tokens, so sparse attention gathers them: all_gather, or a contiguous partition."""
    if job.model.attention != "mla_dsa" or train_of(job).cp_partition == "contiguous":
        return None
    wrong = {kind for kind in _uses(job) if kind.replace("_", "") != "allgather"}
    return f"sparse attention with cp {train_of(job).cp} and {', '.join(sorted(wrong))}" if wrong else None


def _zigzag(job: Job, attention: str) -> str | None:
    train = train_of(job)
    if job.model.attention != attention or train.cp == 1 or train.cp_partition == "contiguous":
        return None
    return f"{job.model.name} with cp {train.cp} and a {train.cp_partition or 'zigzag (the default)'} partition"


@rule(
    "deepseek-v4-cp",
    source="miles miles/utils/arguments.py: hf_validate_args; verl/Megatron-Bridge: cp_partition_mode",
    needs="megatron",
    knobs=("train.cp_partition", "train.cp"),
)
def deepseek_v4_cp(job: Job) -> str | None:
    """DeepSeek-V4 compresses neighbouring tokens, so context parallelism gives each rank a contiguous part."""
    return _zigzag(job, "deepseek_v4")


@rule(
    "inkling-cp",
    source="miles miles_plugins/models/inkling/model.py",
    needs="megatron",
    knobs=("train.cp_partition", "train.cp"),
)
def inkling_cp(job: Job) -> str | None:
    """Inkling's context parallelism gathers over contiguous parts."""
    return _zigzag(job, "inkling")


@rule(
    "hybrid-cp",
    source=ARGUMENTS,
    needs="megatron",
    knobs=("train.switches.hybrid_cp", "train.switches.per_token_loss", "train.pp"),
)
def hybrid_cp(job: Job) -> str | None:
    """Hybrid context parallelism excludes pipelines, Megatron-FSDP and CUDA graphs, and needs the per-token loss."""
    train = train_of(job)
    if not train.switches.hybrid_cp:
        return None
    obstacles = {
        f"pp {train.pp}": train.pp > 1,
        "megatron_fsdp": train.switches.megatron_fsdp,
        "cuda_graphs": train.switches.cuda_graphs,
        "per_token_loss off": train.switches.per_token_loss is False,
    }
    there = [text for text, present in obstacles.items() if present]
    return f"hybrid_cp with {', '.join(there)}" if there else None


def mla_settings(job: Job) -> list[Changes]:
    """What MLA needs."""
    switches = train_of(job).switches
    wanted = {"group_query_attention": False}
    if switches.fused_attention is False:
        wanted["fused_attention"] = True
    if switches.rope_fusion and switches.rope_type not in (None, "yarn"):
        wanted["rope_fusion"] = False
    return [
        tuple((f"train.switches.{name}", value) for name, value in wanted.items() if getattr(switches, name) != value)
    ]


@rule("mla-settings", source=f"{ARGUMENTS}; {CONFIG}", needs="megatron", knobs=(mla_settings,))
def mla_settings_agree(job: Job) -> str | None:
    """MLA has no query groups; key and value heads of unequal size need fused attention under context parallelism; its
    rope fusion exists for yarn only."""
    model, switches = job.model, train_of(job).switches
    if model.attention not in ("mla", "mla_dsa"):
        return None
    unequal = model.qk_nope_head_dim + model.rope_head_dim != model.v_head_dim
    obstacles = {
        "group_query_attention": switches.group_query_attention,
        f"rope_fusion and rope_type {switches.rope_type} (yarn)": bool(
            switches.rope_fusion and switches.rope_type not in (None, "yarn")
        ),
        "fused_attention off with unequal key and value heads": switches.fused_attention is False and unequal,
    }
    there = [text for text, present in obstacles.items() if present]
    return f"multi-latent attention with {', '.join(there)}" if there else None


# --- lengths ----------------------------------------------------------------------------------------------------------


def length_multiple(job: Job) -> int:
    """What the tokens of one micro-batch must be a multiple of, all context-parallel ranks together: 2·cp in zigzag
    halves, tp under sequence parallelism, compressed blocks of DeepSeek-V4, fp8 blocks on each tensor-parallel rank."""
    train = train_of(job)
    multiple = 1
    if train.cp > 1:
        multiple = train.cp if train.cp_partition == "contiguous" else 2 * train.cp
    if train.sequence_parallel:
        multiple *= train.tp
    if job.model.attention == "deepseek_v4":
        multiple = math.lcm(multiple, 128 if train.cp == 1 else 256 * train.cp)
    if job.memory.fp8 == "blockwise":
        multiple = math.lcm(multiple, 128 * train.tp * train.cp)
    return multiple


def next_multiples(job: Job) -> list[Changes]:
    """The next multiples of what is needed: of the padding, or of the answer's length without packing."""
    batch, need = batch_of(job), length_multiple(job)
    if batch.packing:
        now = batch.pad_multiple or 0
        return [(("batch.pad_multiple", (now // need + 1) * need),)]
    prompt, response = batch.prompt_tokens or 0, batch.response_tokens or 0
    total = -(-(prompt + response) // need) * need
    return [(("batch.response_tokens", total - prompt),)]


@rule(
    "sequence-multiple",
    source=f"{ARGUMENTS} (2·cp); megatron/core/tensor_parallel/mappings.py (sequence parallel); "
    "miles miles_plugins/models/deepseek_v4 (128, with cp 256 a rank); verl megatron_utils (128·tp for fp8 blocks)",
    needs="megatron batch",
    knobs=(next_multiples, "train.cp"),
)
def sequence_multiple(job: Job) -> str | None:
    """Tokens of a micro-batch, packed or not, come in multiples of what its ranks and blocks divide."""
    batch, need = batch_of(job), length_multiple(job)
    if batch.packing:
        given, what = batch.pad_multiple, "pad_multiple"
    elif batch.prompt_tokens is not None and batch.response_tokens is not None:
        given, what = batch.prompt_tokens + batch.response_tokens, "sequences of"
    else:
        return None
    if given is None or given % need == 0:
        return None
    train = train_of(job)
    next_one = -(-given // need) * need
    return f"{what} {given} with tp {train.tp}, cp {train.cp}: a multiple of {need} is needed, next {next_one}"


# --- replay -----------------------------------------------------------------------------------------------------------


@rule(
    "indexer-replay-cp",
    source="miles miles/utils/arguments.py: miles_validate_args",
    needs="train",
    knobs=("train.cp", "indexer_replay"),
)
def indexer_replay_cp(job: Job) -> str | None:
    """Replaying an indexer's choice needs cp 1."""
    return (
        f"indexer_replay with cp {train_of(job).cp}: it needs cp 1"
        if job.indexer_replay and train_of(job).cp > 1
        else None
    )


@rule("indexer-replay-model", source="only layers with an indexer choose tokens", knobs=("indexer_replay",))
def indexer_replay_model(job: Job) -> str | None:
    """Replaying an indexer's choice needs a model that has one."""
    return (
        f"indexer_replay for {job.model.name}, which has no indexer"
        if job.indexer_replay and not job.model.indexer_heads
        else None
    )


@rule("routing-replay-model", source="only MoE layers choose experts", knobs=("routing_replay",))
def routing_replay_model(job: Job) -> str | None:
    """Replaying the choice of experts needs a model that has them."""
    return (
        f"routing_replay for {job.model.name}, which has no experts"
        if job.routing_replay and not job.model.is_moe
        else None
    )
