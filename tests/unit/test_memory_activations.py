"""What Megatron-Core keeps of a forward, against sums by hand and a published peak; its communicators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.topology.activations import checkpoint_activations, in_flight, layer_activations, logits_bytes
from lockstep.topology.catalogue import hardware, model_shape
from lockstep.topology.memory import plan_memory
from lockstep.topology.records import Batch, Job, MegatronSwitches, TrainLayout, TrainMemory
from lockstep.topology.trainer_memory import micro_batch_tokens, optimizer_bytes, scoring_tokens

BATCH = Batch(num_prompts=32, group_size=8, prompt_tokens=1024, response_tokens=3072, max_tokens_per_gpu=4096)


def test_activations_of_qwen3_30b() -> None:
    shape, layout = model_shape("qwen3-30b-a3b"), TrainLayout(backend="megatron")
    layer = layer_activations(shape, 0, 8192, layout)
    # By hand: norms and residuals 8·2048, heads 2·(4096 + 1024 + 4096), head norms' inputs 2·(4096 + 512), eight rows
    # of 2·2048 + 6·768, the router's 8·128.
    assert layer == 8192 * (16384 + 18432 + 9216 + 8 * (4096 + 4608) + 1024)
    assert 48 * layer / 1e9 == pytest.approx(45.1, abs=0.05)
    working = layer_activations(shape, 0, 8192, layout, working=True)
    assert working - layer == 8192 * 8 * 2 * 2048
    checkpoints = 48 * checkpoint_activations(shape, 8192, layout)
    assert checkpoints / 1e9 == pytest.approx(1.6, abs=0.02)


def test_a_published_peak_of_qwen3_30b_on_16_h100() -> None:
    """NVIDIA-NeMo/Megatron-Bridge docs/training/moe-optimization.md at 067f987d: 61.351 GB allocated at most, with ep
    16, all-to-all, one sample of 4096 tokens, gradients reduced in bf16 and routing forced to balance. What PyTorch
    allocates has neither context nor communicators in it."""
    layout = TrainLayout(backend="megatron", ep=16, etp=1, switches=MegatronSwitches(implementation="upstream"))
    batch = Batch(num_prompts=1024, group_size=1, global_batch=1024, micro_batch=1, response_tokens=4096, packing=False)
    job = Job(name="published", model=model_shape("qwen3-30b-a3b"), hardware=hardware("h100"), nodes=2, gpus_per_node=8)
    job = replace(job, train=layout, memory=TrainMemory(grad_dtype="bf16"), batch=batch)
    allocated = ("weights", "gradients", "optimizer states", "activations", "logits and loss")
    items = {item.name: item for item in plan_memory(job).phase("train").items}
    assert set(items) == {*allocated, "device context", "communicators"}
    balanced = sum(items[name].num_bytes - items[name].slack for name in allocated)
    assert balanced / 61.351e9 == pytest.approx(1, abs=0.03)


def test_fp8_keeps_the_inputs_of_products_in_one_byte() -> None:
    shape, layout = model_shape("qwen3-4b"), TrainLayout(backend="megatron")
    saved = layer_activations(shape, 0, 1000, layout) - layer_activations(shape, 0, 1000, layout, fp8=True)
    # Two norms' outputs and the MLP's product at half; the heads' output is kept by attention in bf16 and again in fp8.
    assert saved == 1000 * (2 * shape.hidden + shape.ffn - shape.num_heads * shape.head_dim)


def test_logits_of_two_models() -> None:
    layout = TrainLayout(backend="megatron", tp=4)
    v4 = logits_bytes(model_shape("deepseek-v4-flash"), 2048, layout, chunk=None, gradient=True)
    small = logits_bytes(model_shape("inkling-small"), 4096, layout, chunk=None, gradient=True)
    assert (round(v4 / 1e9, 2), round(small / 1e9, 2)) == (0.66, 2.06)
    chunked = logits_bytes(model_shape("inkling-small"), 4096, layout, chunk=512, gradient=True)
    assert chunked == 201_024 // 4 * (2 * 4096 + 8 * 512)
    megatron = replace(layout, switches=MegatronSwitches(implementation="upstream"))
    in_place = logits_bytes(model_shape("inkling-small"), 4096, megatron, chunk=None, gradient=True)
    assert in_place == 201_024 // 4 * 6 * 4096


@given(st.integers(1, 16), st.integers(1, 64), st.sampled_from([None, 2, 4]))
def test_the_first_stage_holds_most_micro_batches(pp: int, micro_batches: int, virtual: int | None) -> None:
    layout = TrainLayout(backend="megatron", pp=pp, virtual_stages=virtual)
    held = [in_flight(layout, stage, micro_batches) for stage in range(pp)]
    assert held == sorted(held, reverse=True)
    assert held[-1] >= 1
    assert held[0] <= min(pp, micro_batches) * (1 + (pp - 1) / (pp * (virtual or 1)))


@settings(deadline=None)
@given(st.sampled_from(["none", "selective", "full"]), st.sampled_from([1024, 4096, 8192]))
def test_recomputation_never_needs_more_and_full_needs_least(mode: Any, tokens: int) -> None:
    def activations(recompute: Any) -> int:
        memory = TrainMemory(recompute=recompute, recompute_method="uniform", recompute_num_layers=1)
        batch = replace(BATCH, max_tokens_per_gpu=tokens)
        layout = TrainLayout(backend="megatron", etp=1, sequence_parallel=True, pp=2, ep=8)
        job = Job(name="job", model=model_shape("qwen3-30b-a3b"), hardware=hardware("h200"), nodes=2, gpus_per_node=8)
        job = replace(job, train=layout, memory=memory, batch=batch)
        item = plan_memory(job).phase("train").item("activations")
        assert item is not None
        return item.num_bytes

    assert activations("full") <= activations(mode) <= activations("none")
    assert activations("full") < activations("none") / 5


def test_communicators_grow_with_the_axes_and_may_be_fewer() -> None:
    """verl issues 6408 and 6266: 7 GB dense and 9.5 GB MoE at tp 2, pp 2, dp 2 on eight H100."""

    def planned(model: str, **layout: Any) -> tuple[float, float]:
        job = Job(name="job", model=model_shape(model), hardware=hardware("h100"), gpus_per_node=8)
        job = replace(job, train=TrainLayout(backend="megatron", **layout))
        item = plan_memory(job).phase("train").item("communicators")
        assert item is not None
        return item.num_bytes / 1e9, (item.num_bytes - item.slack) / 1e9

    assert planned("qwen3-4b", tp=2, pp=2) == pytest.approx((7.0, 3 * 0.544))
    assert planned("qwen3-30b-a3b", tp=2, pp=2, ep=2) == pytest.approx((9.5, 4 * 0.544))
    # What tensor, pipeline and context parallelism leave of the eight is data parallel, an axis if it is more than one.
    assert planned("qwen3-4b", tp=8)[0] == planned("qwen3-4b", cp=8)[0] == pytest.approx(7.0 / 3)
    assert planned("qwen3-4b", tp=2, cp=4)[0] == planned("qwen3-4b", cp=2)[0] == pytest.approx(2 * 7.0 / 3)
    assert planned("qwen3-4b", tp=2, cp=2)[0] == pytest.approx(7.0)
    assert planned("qwen3-30b-a3b", tp=4)[0] == pytest.approx(2 * 7.0 / 3)
    assert planned("qwen3-30b-a3b", tp=4, ep=8)[0] == pytest.approx(2 * 7.0 / 3 + 2.5)
    assert planned("qwen3-4b") == pytest.approx((7 / 3, 0.544))


@pytest.mark.parametrize(
    ("gpus", "cp", "budget", "trained", "scored"),
    [
        (8, 1, 4096, 4096, 4096),  # 8 samples of 4096 a rank and step: the budget is what limits
        (8, 1, 65536, 32768, 65536),  # all 8 at once; of the rollout batch a rank has 16
        (64, 1, 65536, 4096, 8192),  # one sample a rank
        (64, 8, 8192, 4096, 8192),  # 8 samples over the 8 ranks that share them
        (64, 8, 65536, 4096, 8192),
        (128, 1, 512, 4096, 4096),  # a sample is longer than the budget, and half of the ranks have none
    ],
)
def test_a_budget_that_no_step_fills_is_not_counted(gpus: int, cp: int, budget: int, trained: int, scored: int) -> None:
    """A micro-batch has no more samples than its rank: 65536 tokens were counted where one sample of 4096 was."""
    job = Job(name="x", model=model_shape("qwen3-4b"), hardware=hardware("h200"), nodes=gpus // 8, gpus_per_node=8)
    batch = replace(BATCH, num_prompts=16, max_tokens_per_gpu=budget, optimizer_steps=2)
    job = replace(job, train=TrainLayout(backend="megatron", cp=cp), batch=batch)
    assert micro_batch_tokens(job) == (trained, True)
    assert scoring_tokens(job) == (scored, True)
    own = replace(batch, max_tokens_per_gpu=512, score_tokens_per_gpu=budget)
    assert scoring_tokens(replace(job, batch=own)) == (scored, True)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 12),
        ({"precision_aware_optimizer": True}, 2 + 8),  # the low half of each master beside its bf16 weight
        ({"precision_aware_optimizer": True, "weight_dtype": "fp32"}, 4 + 8),
        ({"precision_aware_optimizer": True, "master_dtype": "fp16"}, 2 + 8),
        ({"precision_aware_optimizer": True, "moment_dtype": "bf16"}, 2 + 4),
        ({"precision_aware_optimizer": True, "optimizer_offload_fraction": 0.5}, 12),
    ],
)
def test_bytes_of_an_optimizers_state_follow_its_types(settings: dict, expected: int) -> None:
    assert optimizer_bytes(TrainMemory(**settings)) == expected
