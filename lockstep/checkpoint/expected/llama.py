"""Llama and its kin, and Qwen3-MoE: grouped attention, one gated MLP or many experts.

Written from the headers of meta-llama/Llama-3.2-1B (tied), Qwen/Qwen3-8B and Qwen/Qwen3-30B-A3B: 18,867 tensors in the
last, one for each projection of each of 128 experts in 48 layers.
"""

from __future__ import annotations

from lockstep.checkpoint.expected.rows import Block, Layout, Reader, Row, Sizes, linear, norm

AROUND = (Row("model.embed_tokens.weight", ("vocab", "hidden")), norm("model.norm", "hidden"))
HEAD = (Row("lm_head.weight", ("vocab", "hidden")),)
NORMS = (norm("input_layernorm", "hidden"), norm("post_attention_layernorm", "hidden"))
ATTENTION = (
    linear("self_attn.q_proj", "heads*head_dim", "hidden"),
    linear("self_attn.k_proj", "kv_heads*head_dim", "hidden"),
    linear("self_attn.v_proj", "kv_heads*head_dim", "hidden"),
    linear("self_attn.o_proj", "hidden", "heads*head_dim"),
)
QKV_BIAS = (
    Row("self_attn.q_proj.bias", ("heads*head_dim",)),
    Row("self_attn.k_proj.bias", ("kv_heads*head_dim",)),
    Row("self_attn.v_proj.bias", ("kv_heads*head_dim",)),
)
OUTPUT_BIAS = (Row("self_attn.o_proj.bias", ("hidden",)),)
HEAD_NORMS = (norm("self_attn.q_norm", "head_dim"), norm("self_attn.k_norm", "head_dim"))
MLP = (
    linear("mlp.gate_proj", "ffn", "hidden"),
    linear("mlp.up_proj", "ffn", "hidden"),
    linear("mlp.down_proj", "hidden", "ffn"),
)
MLP_BIAS = (
    Row("mlp.gate_proj.bias", ("ffn",)),
    Row("mlp.up_proj.bias", ("ffn",)),
    Row("mlp.down_proj.bias", ("hidden",)),
)
EXPERTS = (
    Row("mlp.gate.weight", ("experts", "hidden")),
    Row("mlp.experts.{e}.gate_proj.weight", ("moe_ffn", "hidden"), "expert"),
    Row("mlp.experts.{e}.up_proj.weight", ("moe_ffn", "hidden"), "expert"),
    Row("mlp.experts.{e}.down_proj.weight", ("hidden", "moe_ffn"), "expert"),
)


def common_sizes(read: Reader) -> Sizes:
    """What every language model has: layers, vocabulary, width, query heads, rope, whether the head is tied."""
    found = Sizes()
    found.add("layers", read.count("num_hidden_layers", least=1), "num_layers")
    found.add("vocab", read.size("vocab_size"), "vocab")
    found.add("hidden", read.size("hidden_size"), "hidden")
    found.add("heads", read.size("num_attention_heads"), "num_heads")
    found.facts["tied_embeddings"] = read.flag("tie_word_embeddings")
    found.facts.update(read.rope())
    return found


def around(found: Sizes) -> Block:
    """Embedding, final norm, and the head unless it is the embedding."""
    return Block("", AROUND if found.facts["tied_embeddings"] else (*AROUND, *HEAD), found.sizes)


def layout(read: Reader, model_type: str) -> Layout:
    """llama, mistral, qwen2, qwen3, qwen3_moe."""
    found = common_sizes(read)
    heads = found.sizes["heads"]
    found.add("kv_heads", read.size("num_key_value_heads", default=heads), "num_kv_heads")
    found.add("head_dim", read.size("head_dim", default=max(1, found.sizes["hidden"] // heads)), "head_dim")
    found.add("ffn", read.size("intermediate_size"), "ffn")
    sparse: frozenset[int] = frozenset()
    if model_type == "qwen3_moe":
        found.add("experts", read.size("num_experts", "num_local_experts"), "num_experts")
        found.add("moe_ffn", read.size("moe_intermediate_size"), "moe_ffn")
        found.facts["experts_per_token"] = read.size("num_experts_per_tok")
        sparse = _sparse_layers(read, found.sizes["layers"])
    attention = [*NORMS, *ATTENTION]
    bias = read.flag("attention_bias")
    attention += QKV_BIAS if bias or model_type == "qwen2" else ()
    attention += OUTPUT_BIAS if bias and model_type != "qwen2" else ()
    attention += HEAD_NORMS if model_type.startswith("qwen3") else ()
    mlp = [*MLP, *(MLP_BIAS if read.flag("mlp_bias") else ())]
    layers = [
        Block(f"model.layers.{layer}.", (*attention, *(EXPERTS if layer in sparse else mlp)), found.sizes)
        for layer in range(found.sizes["layers"])
    ]
    return Layout([around(found), *layers], found.facts)


def _sparse_layers(read: Reader, num_layers: int) -> frozenset[int]:
    """Qwen3-MoE: every ``decoder_sparse_step``-th layer but those of ``mlp_only_layers``."""
    step = read.size("decoder_sparse_step", default=1)
    dense = read.layer_ids("mlp_only_layers", num_layers) or frozenset()
    return frozenset(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
