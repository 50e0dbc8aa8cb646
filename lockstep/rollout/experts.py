"""A sparse MoE block for a few tokens: each expert that was chosen runs once, on its tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def run_experts(block: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [n, H] and expert ids [n, K] of a Qwen3-MoE block on ``rows`` [n, H].

    Routing is the block's own router. Each expert's output is scaled by its score and the K of a token are summed in
    ascending order of the expert, as transformers' reference loop does.
    """
    _, scores, expert_ids = block.gate(rows)
    experts = block.experts
    num_experts_per_token = expert_ids.shape[1]
    order = expert_ids.flatten().argsort(stable=True)  # pairs (token, choice) by expert
    token_of = order // num_experts_per_token
    counts = torch.bincount(expert_ids.flatten(), minlength=experts.num_experts).tolist()
    inputs = rows[token_of].split(counts)
    weights = scores.flatten()[order][:, None].split(counts)
    outputs = []
    for expert, (states, weight) in enumerate(zip(inputs, weights, strict=True)):
        if not len(states):
            continue
        gate, up = F.linear(states, experts.gate_up_proj[expert]).chunk(2, dim=-1)
        outputs.append(F.linear(F.silu(gate) * up, experts.down_proj[expert]) * weight)
    result = torch.zeros_like(rows)
    result.index_add_(0, token_of, torch.cat(outputs).to(rows.dtype))
    return result, expert_ids
