"""Rules of Megatron's rank grids, and of what tensor and expert parallelism divide."""

from __future__ import annotations

import itertools
import math

from lockstep.topology.grids import AXES, dense_grid, expert_grid, expert_tensor_size
from lockstep.topology.records import Job
from lockstep.topology.repairs import divisors
from lockstep.topology.rules import Changes, rule, train_of

PARALLEL_STATE = "Megatron-LM megatron/core/parallel_state.py: initialize_model_parallel"
RANK_GENERATOR = "Megatron-LM megatron/core/parallel_state.py: RankGenerator.__init__"
CONFIG = "Megatron-LM megatron/core/transformer/transformer_config.py: TransformerConfig.__post_init__"
ARGUMENTS = "Megatron-LM megatron/training/arguments.py: validate_args"
DIVIDE = "Megatron-LM megatron/core/tensor_parallel/layers.py: divide"
MLP = "Megatron-LM megatron/core/transformer/mlp.py: MLP"


# --- grids ------------------------------------------------------------------------------------------------------------


def dense_sizes(job: Job) -> list[Changes]:
    """tp, pp and cp that divide the ranks together, the least changed first."""
    train, world = train_of(job), job.train_world
    sizes = divisors(world)
    fitting = [
        (tp, pp, cp)
        for tp in sizes
        for pp in sizes
        if world % (tp * pp) == 0
        for cp in sizes
        if world % (tp * pp * cp) == 0
    ]
    now = (train.tp, train.pp, train.cp)
    fitting.sort(key=lambda new: sum(abs(math.log2(size / old)) for size, old in zip(new, now, strict=True)))
    paths = ("train.tp", "train.pp", "train.cp")
    every = (
        tuple((path, size) for path, size, old in zip(paths, new, now, strict=True) if size != old) for new in fitting
    )
    return [changes for changes in itertools.islice(every, 40) if changes]


@rule(
    "dense-grid",
    source=f"{ARGUMENTS}; {PARALLEL_STATE}",
    needs="megatron",
    knobs=("train.cp", "train.tp", "train.pp", dense_sizes, "nodes"),
)
def dense_grid_divides(job: Job) -> str | None:
    """tp · pp · cp divides the trainer's ranks; the quotient is the data-parallel size."""
    train, world = train_of(job), job.train_world
    product = train.tp * train.pp * train.cp
    if world % product == 0 and world >= product:
        return None
    return f"tp {train.tp} · pp {train.pp} · cp {train.cp} = {product} does not divide world {world}"


@rule(
    "expert-grid",
    source=PARALLEL_STATE,
    needs="megatron moe",
    knobs=("train.ep", "train.etp", "train.pp", "nodes"),
)
def expert_grid_divides(job: Job) -> str | None:
    """etp · ep · pp divides the trainer's ranks, with etp equal to tp where it is not given. Context parallelism is no
    axis of this grid."""
    train, world = train_of(job), job.train_world
    etp = expert_tensor_size(train)
    product = etp * train.ep * train.pp
    if world % product == 0 and world >= product:
        return None
    default = " (etp defaults to tp)" if train.etp is None and etp > 1 else ""
    return f"etp {etp} · ep {train.ep} · pp {train.pp} = {product} does not divide world {world}{default}"


def without_experts(job: Job) -> list[Changes]:
    """No expert parallelism."""
    return [(("train.ep", 1), ("train.etp", None))]


@rule(
    "no-experts",
    source=f"{ARGUMENTS} (num_experts must be given)",
    needs="megatron",
    knobs=("train.ep", without_experts),
)
def no_experts(job: Job) -> str | None:
    """A model without experts has no expert parallelism."""
    train = train_of(job)
    if job.model.is_moe or (train.ep == 1 and train.etp in (None, 1, train.tp)):
        return None
    etp = "" if train.etp is None else f" and etp {train.etp}"
    return f"ep {train.ep}{etp} for {job.model.name}, which has no experts"


@rule("rank-order", source=RANK_GENERATOR, needs="megatron", knobs=("train.switches.rank_order",))
def rank_order(job: Job) -> str | None:
    """An order of ranks names known axes, each once, and every axis whose size is not 1."""
    train, world = train_of(job), job.train_world
    named = train.switches.rank_order.lower().split("-")
    if sorted(set(named) & set(AXES)) != sorted(named):
        return f"order {train.switches.rank_order}: it is of {', '.join(AXES)}, each once"
    dp, edp = world // (train.tp * train.pp * train.cp), world // (expert_tensor_size(train) * train.ep * train.pp)
    sizes = {"tp": max(train.tp, expert_tensor_size(train)), "pp": train.pp, "cp": train.cp, "ep": train.ep}
    sizes["dp"] = max(dp, edp)
    missing = [f"{axis} {size}" for axis, size in sizes.items() if size > 1 and axis not in named]
    return f"order {train.switches.rank_order} leaves out {', '.join(missing)}" if missing else None


@rule(
    "pipeline-groups",
    source=PARALLEL_STATE,
    needs="megatron",
    knobs=("train.switches.rank_order", "train.etp", "train.ep"),
)
def pipeline_groups(job: Job) -> str | None:
    """Both grids have the same pipeline groups: with an order that does not end in pp, pp must have the same stride on
    both, and the experts' data-parallel size must equal the dense one."""
    train = train_of(job)
    order = train.switches.rank_order
    if train.pp == 1 or order.endswith("pp") or rank_order(job) is not None:
        return None
    try:
        dense, expert = dense_grid(train, job.train_world), expert_grid(train, job.train_world)
    except ValueError:
        return None  # the grids' own rules say so
    edp, dp = expert.sizes["dp"], dense.sizes["dp"]
    if edp != dp:
        return (
            f"order {order} does not end in pp, so the experts' data-parallel size {edp} must equal the dense one, {dp}"
        )
    if expert.stride("pp") != dense.stride("pp"):
        return (
            f"order {order} puts pipeline neighbours {dense.stride('pp')} ranks apart on the dense grid and "
            f"{expert.stride('pp')} on the experts'"
        )
    return None


@rule("optimizer-instances", source=PARALLEL_STATE, needs="megatron", knobs=("train.switches.optimizer_instances",))
def optimizer_instances(job: Job) -> str | None:
    """The number of distributed optimizer instances divides data-parallel · context-parallel ranks."""
    train = train_of(job)
    ranks, instances = job.train_world // (train.tp * train.pp), train.switches.optimizer_instances
    return f"{instances} optimizer instances do not divide dp · cp = {ranks}" if ranks % instances else None


# --- heads and widths against tensor parallelism ----------------------------------------------------------------------


@rule("heads-tp", source=CONFIG, needs="megatron", knobs=("train.tp",))
def heads_tp(job: Job) -> str | None:
    """Attention heads divide by tp."""
    heads, tp = job.model.num_heads, train_of(job).tp
    return f"{heads} attention heads do not divide by tp {tp}" if heads % tp else None


@rule(
    "kv-heads-tp",
    source=f"{CONFIG}; megatron/core/transformer/attention.py: Attention",
    needs="megatron",
    knobs=("train.tp",),
)
def kv_heads_tp(job: Job) -> str | None:
    """Key/value heads divide by tp, or tp by them: then a head is replicated on tp / heads ranks."""
    model, tp = job.model, train_of(job).tp
    if model.attention != "gqa" or model.num_kv_heads % tp == 0 or tp % model.num_kv_heads == 0:
        return None
    return f"{model.num_kv_heads} key/value heads and tp {tp}: neither divides the other"


@rule("inkling-heads-tp", source="miles miles_plugins/mbridge/inkling.py", needs="megatron", knobs=("train.tp",))
def inkling_heads_tp(job: Job) -> str | None:
    """Inkling's key/value heads, of the global and of the windowed layers, divide by tp: none is replicated."""
    model, tp = job.model, train_of(job).tp
    if model.attention != "inkling":
        return None
    wrong = {"global": model.num_kv_heads, "windowed": model.window_kv_heads or model.num_kv_heads}
    wrong = {kind: heads for kind, heads in wrong.items() if heads % tp}
    if not wrong:
        return None
    text = " and ".join(f"{heads} of the {kind} layers" for kind, heads in wrong.items())
    return f"Inkling's key/value heads ({text}) do not divide by tp {tp}"


@rule(
    "output-groups-tp",
    source="miles miles_plugins/models/deepseek_v4/deepseek_v4.py: n_groups per rank",
    needs="megatron",
    knobs=("train.tp",),
)
def output_groups_tp(job: Job) -> str | None:
    """DeepSeek-V4's output projection is in groups, which divide by tp."""
    groups, tp = job.model.o_groups, train_of(job).tp
    return f"{groups} output groups (o_groups) do not divide by tp {tp}" if groups and groups % tp else None


@rule("deepseek-v4-sizes", source="miles miles_plugins/models/deepseek_v4 (compiled kernels)", needs="megatron")
def deepseek_v4_sizes(job: Job) -> str | None:
    """miles' kernels of DeepSeek-V4 have its sizes built in: heads of 512, output rank 1024, a window of 128."""
    model = job.model
    if model.attention != "deepseek_v4" or train_of(job).switches.implementation != "miles":
        return None
    fixed = {"head_dim": 512, "o_lora_rank": 1024, "sliding_window": 128}
    wrong = [
        f"{name} {getattr(model, name)} (it is {size})" for name, size in fixed.items() if getattr(model, name) != size
    ]
    return f"{model.name} has {', '.join(wrong)} in miles" if wrong else None


MTP_PROJECTION = "Megatron-LM megatron/core/transformer/multi_token_prediction.py: eh_proj (column-parallel)"


def _hidden(job: Job) -> str | None:
    hidden, tp = job.model.hidden, train_of(job).tp
    return f"hidden {hidden} does not divide by tp {tp}" if hidden % tp else None


@rule("hidden-tp", source=MTP_PROJECTION, needs="megatron", knobs=("train.tp",))
def hidden_tp(job: Job) -> str | None:
    """The hidden width divides by tp where there are MTP layers: their projection gives it in shards."""
    return _hidden(job) if job.model.mtp_layers else None


@rule("hidden-tp-uneven", severity="warning", source=MTP_PROJECTION, needs="megatron", knobs=("train.tp",))
def hidden_tp_uneven(job: Job) -> str | None:
    """A hidden width that does not divide by tp rules out every layer that gives it in shards, such as MTP."""
    return None if job.model.mtp_layers else _hidden(job)


@rule("ffn-tp", source=f"{DIVIDE}; {MLP}", needs="megatron", knobs=("train.tp",))
def ffn_tp(job: Job) -> str | None:
    """The width of dense MLPs divides by tp."""
    model, tp = job.model, train_of(job).tp
    has_dense = model.ffn and (not model.is_moe or model.dense_layers)
    return f"ffn {model.ffn} does not divide by tp {tp}" if has_dense and model.ffn % tp else None


@rule(
    "shared-ffn-tp",
    source=f"{DIVIDE}; megatron/core/transformer/moe/shared_experts.py",
    needs="megatron moe",
    knobs=("train.tp",),
)
def shared_ffn_tp(job: Job) -> str | None:
    """The width of the shared experts divides by tp: they lie on the dense grid."""
    width, tp = job.model.num_shared_experts * job.model.moe_ffn, train_of(job).tp
    return f"shared experts' ffn {width} does not divide by tp {tp}" if width % tp else None


@rule(
    "expert-ffn-etp",
    source=f"{DIVIDE}; megatron/core/transformer/moe/experts.py",
    needs="megatron moe",
    knobs=("train.etp", "train.tp"),
)
def expert_ffn_etp(job: Job) -> str | None:
    """The width of a routed expert divides by etp."""
    width, etp = job.model.moe_ffn, expert_tensor_size(train_of(job))
    return f"routed experts' ffn {width} does not divide by etp {etp}" if width % etp else None


VOCABULARY = "Megatron-LM megatron/core/tokenizers/utils/build_tokenizer.py: vocab_size_with_padding"


@rule("vocabulary-given", source=VOCABULARY, needs="megatron", knobs=("train.switches.padded_vocab", "train.tp"))
def vocabulary_given(job: Job) -> str | None:
    """A number of embedding rows that is given, not padded, divides by tp and holds the vocabulary."""
    rows, tp, vocab = train_of(job).switches.padded_vocab, train_of(job).tp, job.model.vocab
    if rows is None or (rows % tp == 0 and rows >= vocab):
        return None
    return f"{rows} embedding rows for a vocabulary of {vocab} at tp {tp}: they must divide by tp and hold it"


def padded_vocab(job: Job) -> int:
    """Rows of Megatron's embedding."""
    train = train_of(job)
    if train.switches.padded_vocab is not None:
        return train.switches.padded_vocab
    multiple = train.vocab_divisor * train.tp
    return -(-job.model.vocab // multiple) * multiple


@rule("vocabulary-padding", severity="note", source=VOCABULARY, needs="megatron", knobs=("train.vocab_divisor",))
def vocabulary_padding(job: Job) -> str | None:
    """The vocabulary is padded to a multiple of divisor · tp; whoever exports the embedding cuts the padding off."""
    train, rows, vocab = train_of(job), padded_vocab(job), job.model.vocab
    if rows == vocab or train.switches.padded_vocab is not None:
        return None
    return (
        f"vocabulary {vocab} is padded to {rows} rows ({rows - vocab} more) for divisor {train.vocab_divisor} · tp "
        f"{train.tp}: an export must cut them off"
    )
