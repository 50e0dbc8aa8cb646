"""Parameter counts as formulas over a ``ModelShape``: whole models, and what one rank of a layout holds.

Three kinds of parameter, by what divides them (Megatron-Core's grids, ``parallel_state.RankGenerator``):

    sharded      attention heads, dense MLP, shared experts, embedding, head       / tp
    replicated   norms, routers, down-projections of MLA and DeepSeek-V4,
                 compressors, indexers, hyper-connections, residual convolutions   / 1
    experts      routed experts                                                    / (ep · etp)

The formulas follow transformers' modules (``models/<model_type>/modeling_<model_type>.py``), parameter by parameter;
buffers (router bias, DeepSeek-V4's table of hashed experts) are not parameters. Where a size does not divide, the
count is that of the largest rank. MTP layers, which transformers does not build, are counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from lockstep.topology.records import ModelShape, TrainLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How many ranks share heads and widths (``tp``), experts (``ep``) and each expert's width (``etp``)."""

    tp: int = 1
    ep: int = 1
    etp: int = 1


WHOLE = Split()
"""Nothing is divided: one rank holds the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParameters:
    """Parameters of one decoder layer, by part. ``heads``: projections from and to heads; ``latent``: what attention
    keeps whole on every rank (down-projections, head norms, relative positions, compressors); ``indexer``;
    ``mlp``: a dense layer's, or the shared experts'; ``router``; ``experts``: the routed ones; ``norms``: of the layer,
    with residual convolutions; ``hyper_connections``."""

    heads: int = 0
    latent: int = 0
    indexer: int = 0
    mlp: int = 0
    router: int = 0
    experts: int = 0
    norms: int = 0
    hyper_connections: int = 0

    @property
    def sharded(self) -> int:
        """Divided by the tensor-parallel size."""
        return self.heads + self.mlp

    @property
    def replicated(self) -> int:
        """Whole on every tensor-parallel rank."""
        return self.latent + self.indexer + self.router + self.norms + self.hyper_connections

    @property
    def total(self) -> int:
        """All of them."""
        return self.sharded + self.replicated + self.experts


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """A whole model, or the share of one rank if it was counted with a ``Split``. ``outer``: final norm, embedding norm
    and DeepSeek-V4's stream-collapse head. ``head`` is 0 where it is the embedding."""

    embedding: int
    head: int
    outer: int
    layers: tuple[LayerParameters, ...]

    @property
    def total(self) -> int:
        """Every parameter once."""
        return self.embedding + self.head + self.outer + sum(layer.total for layer in self.layers)

    @property
    def experts(self) -> int:
        """Routed experts."""
        return sum(layer.experts for layer in self.layers)

    @property
    def indexer(self) -> int:
        """Indexers: they choose keys by top-k and get no gradient from the policy's loss."""
        return sum(layer.indexer for layer in self.layers)

    def active(self, shape: ModelShape) -> int:
        """Parameters that one token goes through, embedding and head included."""
        if not shape.is_moe:
            return self.total
        return self.total - self.experts + self.experts * shape.experts_per_token // shape.num_experts


@dataclass(frozen=True, slots=True)
class RankParameters:
    """What one rank of a pipeline stage holds, by what divides its optimizer's states: ``sharded`` and ``replicated``
    over dp · cp, ``experts`` over the expert grid's own data-parallel size. ``sharded`` includes ``embedding``."""

    sharded: int
    replicated: int
    experts: int
    embedding: int

    @property
    def dense(self) -> int:
        """Everything but routed experts."""
        return self.sharded + self.replicated

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts


def count_parameters(shape: ModelShape, split: Split = WHOLE) -> ParameterCounts:
    """Parameters of ``shape`` as transformers builds it; with a ``split``, those of the largest rank (no padding of
    the vocabulary, no pipeline)."""
    rows = _parts(shape.vocab, split.tp)
    return ParameterCounts(
        embedding=rows * shape.hidden,
        head=0 if shape.tied_embeddings else rows * shape.hidden,
        outer=_outer_begin(shape) + _outer_end(shape),
        layers=tuple(layer_parameters(shape, layer, split) for layer in range(shape.num_layers)),
    )


def layer_parameters(shape: ModelShape, layer: int, split: Split = WHOLE) -> LayerParameters:
    """Parameters of decoder layer ``layer`` (from 0), of the largest rank of ``split``."""
    heads, latent = _ATTENTION[shape.attention](shape, layer, split.tp)
    counted = LayerParameters(
        heads=heads,
        latent=latent,
        indexer=_indexer(shape, layer),
        norms=2 * shape.hidden + 2 * shape.conv_kernel * shape.hidden,
        hyper_connections=_hyper_connections(shape),
    )
    return _add(counted, _feed_forward(shape, layer, split))


def rank_parameters(
    shape: ModelShape, layout: TrainLayout, stage_layers: Iterable[int], *, first_stage: bool, last_stage: bool
) -> RankParameters:
    """The share of one rank of a Megatron pipeline stage that has the decoder layers ``stage_layers``.

    The vocabulary is padded to a multiple of ``vocab_divisor`` · tp (``vocab_size_with_padding``). With tied embeddings
    the last stage has a copy of its own (``LanguageModule.setup_embeddings_and_output_layer``).
    """
    split = Split(tp=layout.tp, ep=layout.ep, etp=layout.etp if layout.etp is not None else layout.tp)
    layers = [layer_parameters(shape, layer, split) for layer in stage_layers]
    rows = padded_vocab(shape.vocab, layout) // layout.tp
    only_once = shape.tied_embeddings and first_stage
    copies = int(first_stage) + int(last_stage and not only_once)
    embedding = copies * rows * shape.hidden
    outer = first_stage * _outer_begin(shape) + last_stage * _outer_end(shape)
    return RankParameters(
        sharded=sum(layer.sharded for layer in layers) + embedding,
        replicated=sum(layer.replicated for layer in layers) + outer,
        experts=sum(layer.experts for layer in layers),
        embedding=embedding,
    )


def padded_vocab(vocab: int, layout: TrainLayout) -> int:
    """Rows of Megatron's embedding: ``vocab`` up to the next multiple of ``vocab_divisor`` · tp."""
    return _parts(vocab, layout.vocab_divisor * layout.tp) * layout.vocab_divisor * layout.tp


def has_counted_mtp(shape: ModelShape) -> bool:
    """Whether the checkpoint has multi-token-prediction layers that are counted: all but Inkling's."""
    return bool(shape.mtp_layers) and shape.attention in ("deepseek_v4", "mla_dsa", "mla")


# --- attention: (what heads divide, what stays whole) ----------------------------------------------------------------


def _gqa(shape: ModelShape, layer: int, tp: int) -> tuple[int, int]:
    q = _parts(shape.num_heads, tp) * shape.head_dim
    kv = _parts(shape.num_kv_heads, tp) * shape.head_dim
    bias = q + 2 * kv if shape.attention_bias else 0
    output_bias = shape.hidden if shape.attention_bias and shape.model_type != "qwen2" else 0
    return 2 * shape.hidden * (q + kv) + bias, output_bias + (2 * shape.head_dim if shape.qk_norm else 0)


def _mla(shape: ModelShape, layer: int, tp: int) -> tuple[int, int]:
    hidden, heads = shape.hidden, _parts(shape.num_heads, tp)
    query = heads * (shape.qk_nope_head_dim + shape.rope_head_dim)
    from_heads = (
        heads * shape.kv_lora_rank * (shape.qk_nope_head_dim + shape.v_head_dim) + heads * shape.v_head_dim * hidden
    )
    down_kv = hidden * (shape.kv_lora_rank + shape.rope_head_dim) + shape.kv_lora_rank
    if not shape.q_lora_rank:
        return hidden * query + from_heads, down_kv
    return shape.q_lora_rank * query + from_heads, (hidden + 1) * shape.q_lora_rank + down_kv


def _deepseek_v4(shape: ModelShape, layer: int, tp: int) -> tuple[int, int]:
    hidden, heads, groups = shape.hidden, _parts(shape.num_heads, tp), _parts(shape.o_groups, tp)
    query = shape.q_lora_rank * heads * shape.head_dim
    group_width = shape.num_heads * shape.head_dim // shape.o_groups
    output = groups * shape.o_lora_rank * (group_width + hidden)
    sinks = heads
    down = (hidden + 1) * (shape.q_lora_rank + shape.head_dim)
    ratio = shape.compress_ratios[layer] if layer < len(shape.compress_ratios) else 0
    # A ratio-4 layer compresses overlapping windows: twice the width.
    width = shape.head_dim * (2 if ratio == 4 else 1)
    compressor = (2 * hidden + ratio) * width + shape.head_dim if ratio else 0
    return query + output + sinks, down + compressor


def _inkling(shape: ModelShape, layer: int, tp: int) -> tuple[int, int]:
    hidden, heads, local = shape.hidden, _parts(shape.num_heads, tp), layer in shape.window_layers
    kv = _parts(shape.window_kv_heads if local else shape.num_kv_heads, tp) * shape.head_dim
    extent = shape.sliding_window if local else shape.relative_extent
    projections = 2 * hidden * (heads * shape.head_dim + kv) + hidden * heads * shape.relative_dim
    convolutions = 2 * shape.conv_kernel * kv
    return projections + convolutions, 2 * shape.head_dim + shape.relative_dim * extent


_ATTENTION = {"gqa": _gqa, "mla": _mla, "mla_dsa": _mla, "deepseek_v4": _deepseek_v4, "inkling": _inkling}


def _indexer(shape: ModelShape, layer: int) -> int:
    heads, size, hidden = shape.indexer_heads, shape.indexer_head_dim, shape.hidden
    if not heads:
        return 0
    queries = shape.q_lora_rank * heads * size + heads * hidden
    if shape.attention == "deepseek_v4":
        if layer >= len(shape.compress_ratios) or shape.compress_ratios[layer] != 4:
            return 0
        return queries + 2 * size * (2 * hidden + 4) + size
    return queries + hidden * size + 2 * size if layer in shape.index_layers else 0


# --- what follows attention, and what is outside the layers ----------------------------------------------------------


def _feed_forward(shape: ModelShape, layer: int, split: Split) -> LayerParameters:
    hidden = shape.hidden
    scale = 1 if shape.attention == "inkling" else 0  # its dense MLPs and its routers have a learned factor
    if not shape.is_moe or layer < shape.dense_layers:
        return LayerParameters(mlp=3 * hidden * _parts(shape.ffn, split.tp), norms=scale)
    # Inkling's router scores the shared experts too.
    scored = shape.num_experts + (shape.num_shared_experts if shape.attention == "inkling" else 0)
    return LayerParameters(
        mlp=3 * hidden * shape.num_shared_experts * _parts(shape.moe_ffn, split.tp),
        router=hidden * scored + scale,
        experts=_parts(shape.num_experts, split.ep) * 3 * hidden * _parts(shape.moe_ffn, split.etp),
    )


def _hyper_connections(shape: ModelShape) -> int:
    """Two a layer: the product that mixes n streams, n·(2 + n) rows over n·hidden, its base, and three scales."""
    streams = shape.hyper_connections
    mixed = streams * (2 + streams)
    return 2 * (mixed * (streams * shape.hidden + 1) + 3) if streams else 0


def _outer_begin(shape: ModelShape) -> int:
    return shape.hidden if shape.attention == "inkling" else 0


def _outer_end(shape: ModelShape) -> int:
    streams = shape.hyper_connections
    return shape.hidden + (streams * (streams * shape.hidden + 1) + 1 if streams else 0)


def _parts(size: int, among: int) -> int:
    """The largest share of ``size`` things among ``among`` ranks; at least one (a head that is replicated)."""
    return -(-size // among)


def _add(a: LayerParameters, b: LayerParameters) -> LayerParameters:
    return LayerParameters(**{f.name: getattr(a, f.name) + getattr(b, f.name) for f in fields(LayerParameters)})
