"""Hand-written decoding for Llama, Qwen3 and Qwen3-MoE: one token for every slot, over a preallocated cache.

Prefill runs through the model's own modules (right padding is exact for these architectures); decoding repeats their
arithmetic, in their order of operations and roundings, with less around it:

- q, k and v are one product, gate and up are one product, of packed weights (``packed_linear``);
- keys and values lie in [layers, rows, kv heads, 2, positions, head size]: one write appends both, attention reads
  only the positions in use (``decode_kernels``);
- rows are dense: when a sequence leaves, the last row moves into its place.

Norms, embeddings and experts are read from the modules themselves, so only packed weights are derived state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lockstep.model.adapter import num_experts, routers, stacked_routes
from lockstep.model.head import Float32Head
from lockstep.rollout.decode_kernels import add_rms_norm, decode_attention, rms_norm, rotate_append, silu_mul
from lockstep.rollout.decoding import DecoderState, Prefilled
from lockstep.rollout.experts import run_experts
from lockstep.rollout.module_decoder import ModuleDecoder, run_body
from lockstep.rollout.packed_linear import Float32Linear, FusedLinear

_ARCHITECTURES = frozenset({"LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"})
# Their frequencies depend on the length of the sequence at hand, so a table would be wrong.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_GROW_POSITIONS = 128


def unsupported(model: Any) -> str | None:
    """Why the hand-written decoder can't run ``model``, or None if it can."""
    config = model.config
    if type(model).__name__ not in _ARCHITECTURES:
        return f"no hand-written decoder for {type(model).__name__}"
    if config.rope_parameters["rope_type"] in _LENGTH_DEPENDENT_ROPE:
        return f"rope type {config.rope_parameters['rope_type']!r} depends on the length"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r} is not silu"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "some layers attend to a window only"
    if getattr(config, "use_sliding_window", False):
        return "attention is limited to a window"
    if next(model.parameters()).device.type != "cpu":
        return "it is written for CPU tensors"
    return None


class _Layer:
    """One decoder layer's weights as decoding reads them."""

    def __init__(self, prefix: str, layer: Any) -> None:
        attention = layer.self_attn
        self.input_norm = layer.input_layernorm
        self.post_norm = layer.post_attention_layernorm
        self.query_norm = getattr(attention, "q_norm", None)
        self.key_norm = getattr(attention, "k_norm", None)
        qkv = ("q_proj", "k_proj", "v_proj")
        self.qkv = FusedLinear(
            [f"{prefix}.self_attn.{name}.weight" for name in qkv], [getattr(attention, name) for name in qkv]
        )
        self.output = FusedLinear([f"{prefix}.self_attn.o_proj.weight"], [attention.o_proj])
        self.experts = layer.mlp if hasattr(layer.mlp, "experts") else None
        self.linears = [self.qkv, self.output]
        if self.experts is None:
            pair = ("gate_proj", "up_proj")
            self.gate_up = FusedLinear(
                [f"{prefix}.mlp.{name}.weight" for name in pair], [getattr(layer.mlp, name) for name in pair]
            )
            self.down = FusedLinear([f"{prefix}.mlp.down_proj.weight"], [layer.mlp.down_proj])
            self.linears += [self.gate_up, self.down]

    def feed_forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The layer's MLP or experts on [n, H]; with experts also their ids [n, K]."""
        if self.experts is not None:
            return run_experts(self.experts, rows)
        return self.down(silu_mul(self.gate_up(rows))), None


class FastDecoder(ModuleDecoder):
    """``Decoder`` for the architectures that ``unsupported`` lets through."""

    def __init__(self, model: Any, vocab_limit: int | None = None) -> None:
        reason = unsupported(model)
        if reason is not None:
            raise ValueError(f"the fast path does not apply: {reason}")
        super().__init__(model, vocab_limit)
        self.model = model
        self.layers = [_Layer(f"model.layers.{i}", layer) for i, layer in enumerate(model.model.layers)]
        name, head = "lm_head.weight", model.lm_head
        self.head = Float32Linear(name, head) if isinstance(head, Float32Head) else FusedLinear([name], [head])
        self.num_experts = num_experts(model) if routers(model) else 0

    def prefill(
        self, sequences: Sequence[torch.Tensor], *, keep_cache: bool, want_routes: bool, max_tokens: int
    ) -> list[Prefilled]:
        """See ``Decoder``. Sequences of similar length share a forward, padded on the right: a causal model's real
        positions never see the padding. A cache is [layers, kv heads, 2, T, head size]."""
        results: list[Prefilled | None] = [None] * len(sequences)
        for chunk in _padded_batches([len(sequence) for sequence in sequences], max_tokens):
            batch = torch.nn.utils.rnn.pad_sequence([sequences[i] for i in chunk], batch_first=True)
            cache = self.split.new_cache() if keep_cache else None
            hidden, routes = run_body(self.split, batch, cache, want_routes)
            for row, index in enumerate(chunk):
                length = len(sequences[index])
                results[index] = Prefilled(
                    hidden[row, :length],
                    None if routes is None else routes[row, :length],
                    None if cache is None else _cache_row(cache, row, length),
                )
        return [result for result in results if result is not None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``Decoder``."""
        return self.head(hidden)[:, : self.vocab_limit]

    def new_state(self, num_slots: int) -> DecoderState:
        """See ``Decoder``."""
        return SlotState(self, num_slots)

    def refresh(self) -> None:
        """Pack the live weights again."""
        for linear in self._linears():
            linear.refresh()

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The packed weights, unpacked."""
        for linear in self._linears():
            yield from linear.unpacked()

    def _linears(self) -> Iterator[FusedLinear | Float32Linear]:
        for layer in self.layers:
            yield from layer.linears
        yield self.head


def _padded_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices by falling length, in batches whose padded size stays within ``max_tokens`` (a longer one alone)."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > max_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches


def _cache_row(cache: Any, row: int, length: int) -> torch.Tensor:
    """One sequence of a DynamicCache as [layers, kv heads, 2, T, head size]."""
    return torch.stack(
        [torch.stack([layer.keys[row, :, :length], layer.values[row, :, :length]], dim=1) for layer in cache.layers]
    )


class SlotState:
    """Keys and values of up to ``num_slots`` sequences. Sequence r of ``_slots`` is row r; rows are dense.

    Beyond a row's length there are zeros: masked positions are multiplied by zero, which a NaN would come through.
    """

    def __init__(self, decoder: FastDecoder, num_slots: int) -> None:
        config = decoder.model.config
        self._decoder = decoder
        self._num_slots = num_slots
        self._dtype = decoder.model.dtype
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads: int = config.num_key_value_heads
        self._head_size: int = decoder.model.model.layers[0].self_attn.head_dim
        self._scaling: float = decoder.model.model.layers[0].self_attn.scaling
        self._slots: list[int] = []
        self._lengths: list[int] = []
        self._cache = torch.empty(0)  # [layers, rows, kv heads, 2, positions, head size]
        self._cosines = torch.empty(0)  # [positions, 1, head size]
        self._sines = torch.empty(0)  # the same, first half negated: see rotate_append
        self._num_positions = 0

    def place(self, prefilled: Prefilled, slots: Sequence[int]) -> None:
        """See ``DecoderState``."""
        length = prefilled.cache.shape[3]
        self._reserve(length + 1)
        for slot in slots:
            self._cache[:, len(self._slots), :, :, :length] = prefilled.cache
            self._slots.append(slot)
            self._lengths.append(length)

    def release(self, slots: Sequence[int]) -> None:
        """See ``DecoderState``. The last row moves into the place of one that leaves."""
        for slot in slots:
            row, last = self._slots.index(slot), len(self._slots) - 1
            length = self._lengths[last]
            if row != last:
                self._cache[:, row, :, :, :length] = self._cache[:, last, :, :, :length]
                self._cache[:, row, :, :, length : self._lengths[row]] = 0
                self._slots[row], self._lengths[row] = self._slots[last], length
            self._cache[:, last, :, :, :length] = 0
            self._slots.pop()
            self._lengths.pop()

    def decode(
        self, slots: Sequence[int], tokens: torch.Tensor, want_routes: bool
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """See ``DecoderState``."""
        row_of = {slot: row for row, slot in enumerate(self._slots)}
        rows = [row_of[slot] for slot in slots]
        in_order = rows == list(range(len(rows)))
        order = torch.tensor(rows)  # order[i]: row of the i-th given slot
        if not in_order:
            tokens = torch.empty_like(tokens).index_copy_(0, order, tokens)
        hidden, experts = self._forward(tokens)
        if not in_order:
            hidden = hidden[order]
            experts = [ids[order] for ids in experts]
        routes = stacked_routes(experts, self._decoder.num_experts) if want_routes and experts else None
        return self._decoder.logits(hidden), routes

    def _forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Append one token to each row: final hidden states [n, H] and each MoE layer's expert ids [n, K]."""
        self._reserve(max(self._lengths) + 1)
        positions = torch.tensor(self._lengths)
        lengths, rotary = positions + 1, (self._cosines[positions], self._sines[positions])
        hidden = F.embedding(tokens, self._decoder.model.model.embed_tokens.weight)
        change: torch.Tensor | None = None
        chosen: list[torch.Tensor] = []
        for index, layer in enumerate(self._decoder.layers):
            qkv = layer.qkv(add_rms_norm(layer.input_norm, hidden, change))
            attended = self._attend(layer, self._cache[index], qkv, rotary, positions, lengths)
            change, experts = layer.feed_forward(add_rms_norm(layer.post_norm, hidden, layer.output(attended)))
            if experts is not None:
                chosen.append(experts)
        self._lengths = [length + 1 for length in self._lengths]
        hidden = add_rms_norm(self._decoder.model.model.norm, hidden, change)
        return hidden, chosen

    def _attend(
        self,
        layer: _Layer,
        cache: torch.Tensor,
        qkv: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """Append this token's key and value to ``cache`` [rows, kv heads, 2, positions, head size] and attend."""
        heads, kv_heads, size = self._num_heads, self._num_kv_heads, self._head_size
        qkv = qkv.view(len(positions), heads + 2 * kv_heads, size)
        if layer.query_norm is not None:
            qkv[:, :heads] = rms_norm(layer.query_norm, qkv[:, :heads])
            qkv[:, heads : heads + kv_heads] = rms_norm(layer.key_norm, qkv[:, heads : heads + kv_heads])
        rotate_append(qkv, rotary, cache, positions, heads)
        return decode_attention(qkv[:, :heads], cache, lengths, self._scaling).view(len(positions), heads * size)

    def _reserve(self, num_positions: int) -> None:
        """Room for ``num_positions`` tokens in every row, in cache and rotary tables."""
        if num_positions <= self._num_positions:
            return
        grown = -(-num_positions // _GROW_POSITIONS) * _GROW_POSITIONS
        shape = (len(self._decoder.layers), self._num_slots, self._num_kv_heads, 2, grown, self._head_size)
        cache = torch.zeros(shape, dtype=self._dtype)
        if self._num_positions:
            cache[..., : self._num_positions, :] = self._cache
        self._cache, self._num_positions = cache, grown
        probe = torch.empty(1, dtype=self._dtype)
        cosines, sines = self._decoder.model.model.rotary_emb(probe, torch.arange(grown)[None])
        self._cosines = cosines[0][:, None]
        self._sines = sines[0][:, None].clone()
        self._sines[..., : self._head_size // 2].neg_()
