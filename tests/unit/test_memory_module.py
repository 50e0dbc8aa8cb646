"""Lockstep's own trainer and engine: activations against what autograd saves, phases against live tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.memory_gpu import GOAL, job_of, measure
from benchmarks.memory_workloads import FITTED, HELD_OUT, Configuration
from lockstep.topology.memory import plan_memory
from lockstep.topology.module_activations import (
    module_checkpoint,
    module_layer_activations,
    module_outer_activations,
)
from lockstep.topology.shapes import shape_from_config

SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
}
MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
ROWS, COLUMNS = 2, 64
JUDGED = ("trainer start", "engine start", "refit", "generate", "score", "train", "save")


SPARSE: dict[str, Any] = {
    "hidden_size": 256,
    "vocab_size": 64,
    "n_routed_experts": 16,
    "num_attention_heads": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 96,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "n_group": 1,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "topk_group": 1,
    "mlp_layer_types": ["sparse"] * 2,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3": SIZES,
    "qwen3_moe": {**SIZES, **MOE},
    "glm4_moe_lite": {**SPARSE, **MLA},
    "glm_moe_dsa": {**SPARSE, **MLA, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 32},
    "inkling_text": {
        **SPARSE,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 32,
        "sliding_window_size": 32,
        "local_layer_ids": [],
        "rel_extent": 64,
    },
    "deepseek_v4": {
        **SPARSE,
        "head_dim": 32,
        "q_lora_rank": 64,
        "o_lora_rank": 64,
        "o_groups": 2,
        "index_n_heads": 8,
        "index_topk": 8,
        "index_head_dim": 16,
        "sliding_window": 16,
        "mlp_layer_types": ["moe"] * 2,
        "layer_types": ["compressed_sparse_attention"] * 2,
    },
}
"""Two layers of each architecture, all alike."""


def saved_bytes(model_type: str, num_layers: int, dtype: torch.dtype, *, masked: bool, checkpointed: bool) -> int:
    """Bytes of every storage that autograd keeps in one forward of the body, parameters and buffers left out."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from lockstep.model.architectures import freeze_untrained
    from lockstep.train.fsdp import _enable_checkpointing

    fields = {**ARCHITECTURES[model_type], "num_hidden_layers": num_layers}
    fields |= {name: value[:num_layers] for name, value in fields.items() if name.endswith("layer_types")}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), dtype=dtype).eval()
    freeze_untrained(model, model.config)
    if checkpointed:
        _enable_checkpointing(model)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # a freed storage's address would be used again
        return tensor

    arguments: dict[str, Any] = {"input_ids": torch.randint(0, 64, (ROWS, COLUMNS)), "use_cache": False}
    if masked:
        arguments["attention_mask"] = torch.ones(ROWS, 1, COLUMNS, COLUMNS, dtype=torch.bool).tril()
        arguments["position_ids"] = torch.arange(COLUMNS)[None].expand(ROWS, COLUMNS)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(**arguments)
    return sum(found.values())


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_keeps_what_autograd_saves_to_the_byte(model_type: str, masked: bool, dtype: torch.dtype) -> None:
    one, two = (saved_bytes(model_type, num_layers, dtype, masked=masked, checkpointed=False) for num_layers in (1, 2))
    shape = shape_from_config({"model_type": model_type, **ARCHITECTURES[model_type]}, "x")
    tokens, row = ROWS * COLUMNS, COLUMNS if masked else None
    assert two - one == module_layer_activations(shape, 0, tokens, row=row, width=dtype.itemsize)
    if masked:
        # The head's input is the body's output: it is kept by what follows.
        output = tokens * dtype.itemsize * shape.hidden
        assert 2 * one - two == module_outer_activations(shape, tokens, width=dtype.itemsize) - output


@pytest.mark.parametrize(
    ("model_type", "tolerance"),
    [("glm4_moe_lite", 0.0), ("glm_moe_dsa", 0.0), ("inkling_text", 0.005), ("deepseek_v4", 0.06)],
)
def test_other_kinds_of_attention_keep_what_is_counted(model_type: str, tolerance: float) -> None:
    # DeepSeek-V4: 3 % are float32 casts of hyper-connection weights, which a loaded model keeps in float32.
    masked = model_type.startswith("glm")
    one, two = (saved_bytes(model_type, n, torch.bfloat16, masked=masked, checkpointed=False) for n in (1, 2))
    shape = shape_from_config({"model_type": model_type, **ARCHITECTURES[model_type], "num_hidden_layers": 2}, "x")
    planned = module_layer_activations(shape, 1, ROWS * COLUMNS, row=COLUMNS)
    assert planned == pytest.approx(two - one, rel=tolerance)


def test_a_checkpointed_layer_keeps_its_input() -> None:
    one, two = (saved_bytes("qwen3", n, torch.bfloat16, masked=True, checkpointed=True) for n in (1, 2))
    shape = shape_from_config({"model_type": "qwen3", **SIZES}, "x")
    assert two - one == module_checkpoint(shape, ROWS * COLUMNS)


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_a_real_step_refit_and_generation_need_what_was_planned(name: str) -> None:
    phases = measure(name, "cpu", save=True)["phases"]
    assert phases["micro_batches"]["count"] == 2
    ratios = {phase: phases[phase]["ratio"] for phase in JUDGED}
    assert all(abs(ratio - 1) < 0.02 for ratio in ratios.values()), ratios


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FITTED if name.startswith("mid")])
def test_larger_steps_need_what_was_planned(name: str) -> None:
    phases = measure(name, "cpu", save=False)["phases"]
    ratios = {phase: phases[phase]["ratio"] for phase in ("refit", "generate", "score", "train")}
    assert all(abs(ratio - 1) < 0.04 for ratio in ratios.values()), ratios


def test_the_plan_would_notice_a_phase_that_needs_a_tenth_more() -> None:
    """The goal is narrower than what any one part of a training step weighs: a part left out is seen."""
    plan = plan_memory(job_of("qwen3-0_6b", HELD_OUT["qwen3-0_6b"], "cuda")).phase("train")
    shares = {item.name: item.num_bytes / plan.total_bytes for item in plan.items}
    assert all(shares[name] > GOAL for name in ("optimizer states", "gradients", "activations"))


def test_fitted_and_held_out_configurations_are_apart() -> None:
    assert not FITTED.keys() & HELD_OUT.keys()
    assert len(HELD_OUT) == 3


@pytest.mark.parametrize("work", [*HELD_OUT.values(), *FITTED.values()])
def test_the_work_fills_its_micro_batches(work: Configuration) -> None:
    row = work.prompt + work.group_size * (work.response - 1)
    per_batch = work.micro_batch // row
    assert row <= 4 * (work.prompt + work.response - 1)  # a prompt's samples share one row
    assert per_batch * row == work.micro_batch or work.num_prompts * row <= work.micro_batch


def test_recomputation_offers_activations_and_keeps_states() -> None:
    job = job_of("x", HELD_OUT["qwen3-0_6b"], "cuda")
    plain = plan_memory(job).phase("train")
    again = plan_memory(replace(job, memory=replace(job.memory, recompute="full"))).phase("train")
    activations = [phase.item("activations") for phase in (plain, again)]
    assert activations[0] is not None
    assert activations[1] is not None
    assert activations[1].num_bytes < activations[0].num_bytes / 8
    assert again.item("optimizer states") == plain.item("optimizer states")


def test_one_device_holds_fourteen_bytes_a_parameter_and_four_of_gradients() -> None:
    job = job_of("x", HELD_OUT["qwen3-30b-a3b-4layer"], "cuda")
    parameters = 4 * (18_874_624 + 603_979_776 + 128 * 2048 + 2 * 2048) + 2 * 151_936 * 2048 + 2048
    plan = plan_memory(job)
    held = {item.name: item.num_bytes for item in plan.phase("save").items if item.owner == "trainer"}
    assert held["weights"] + held["optimizer states"] == 14 * parameters
    gradients = plan.phase("train").item("gradients")
    assert gradients is not None
    assert gradients.num_bytes == 4 * parameters


def test_several_devices_share_sixteen_bytes_a_parameter() -> None:
    job = job_of("x", HELD_OUT["qwen3-0_6b"], "cuda")
    wide = plan_memory(replace(job, nodes=1, gpus_per_node=8))
    train = wide.phase("train")
    total = sum(
        item.num_bytes
        for item in train.items
        if item.name in ("weights", "optimizer states", "gradients") and item.owner == "trainer"
    )
    assert total == pytest.approx(16 * 596_049_920 / 8, rel=1e-6)
    gathered = train.item("gathered weights")
    assert gathered is not None
    assert gathered.basis == "assumed"
