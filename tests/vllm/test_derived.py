"""Each entry of the registry, proved by breaking what it mends in a real vLLM.

Without the entry the engine differs from one that loads the same weights from disk; with it, it does not, and the
receipt names what was repaired.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.records import DerivedReport
from lockstep.refit.derived import DerivedStateError, DerivedTensor, Registry, TensorEntry
from lockstep.refit.derived_vllm import MXFP4_REFITTABLE, ScaleEntry, registry
from lockstep.refit.transaction import Receipt, RefitError
from lockstep.rollout.vllm_hooks import model_runner, served_model
from lockstep.rollout.vllm_reload import poison, shallow_copy
from tests.vllm.models import greedy_tokens, request, run, start_engine, tiny_model
from tests.vllm.refits import (
    BOUND,
    NUM_GREEDY,
    answers,
    assert_behaves,
    assert_like_a_fresh_engine,
    behaviour,
    close_references,
    loaded_from_disk,
    refit,
    weights,
)

pytestmark = pytest.mark.lane(
    "stage-a-vllm", hardware={"cpu": "cpu"}, minutes=1, owner="vllm", labels=["refit", "vllm"]
)


@pytest.fixture(scope="module")
def engines() -> Iterator[Any]:
    """The engine of a family, made when it is asked for. One at a time: vLLM's process groups are those of the first
    model in a process, and a dense one makes none for experts."""
    made: dict[str, Any] = {}

    def get(family: str) -> Any:
        if family not in made:
            for other in list(made):
                made.pop(other).close()
                close_references()
            made[family] = start_engine(tiny_model(family), derived=registry())
        made[family].receiver()._derived = registry()
        return made[family]

    yield get
    for engine in made.values():
        engine.close()
    close_references()


def without(engine: Any, *names: str) -> None:
    engine.receiver()._derived = registry().without(*names)


def report(receipt: Receipt, entry: str) -> DerivedReport:
    return next(one for one in receipt.derived if one.entry == entry)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_experts_that_are_not_packed_again(engines: Any, family: str) -> None:
    """vLLM takes an existing kernel for packed weights."""
    engine = engines(family)
    refit(engine, weights(family, 2))
    without(engine, "moe_kernel_layout")
    refit(engine, weights(family, 3), verify=False)
    assert answers(engine).same_tokens(loaded_from_disk(family, 3)) < NUM_GREEDY // 2
    assert behaviour(engine, family, 3)().status == "failed"
    before = behaviour(engine, family, 3)
    with pytest.raises(RefitError, match=r"a claim failed: loaded: model\.layers\..*experts.*differ.*; behaves: "):
        refit(engine, weights(family, 3), behaves=before)
    engine.receiver()._derived = registry()
    refit(engine, weights(family, 2))
    receipt = refit(engine, weights(family, 3), behaves=behaviour(engine, family, 3))
    assert_behaves(receipt)
    assert_like_a_fresh_engine(engine, family, 3)
    layers = 2 if family == "qwen3_moe" else 1
    assert report(receipt, "moe_kernel_layout").num_states == layers
    assert report(refit(engine, weights(family, 2)), "moe_kernel_layout").num_changed == layers


def test_a_loader_that_bypasses_the_reload(engines: Any) -> None:
    """GPT-OSS's writes experts and sinks without their weight loaders: the reload would keep the old ones."""
    engine = engines("gpt_oss")
    refit(engine, weights("gpt_oss", 2))
    receiver = engine.receiver()
    plan = receiver._plan
    assert {path.rpartition(".")[2] for path in plan.bypassed} == {"attn", "routed_experts"}
    receiver._plan = replace(plan, bypassed=frozenset())
    with pytest.raises(RefitError, match="the loader wrote 0 of"):
        refit(engine, weights("gpt_oss", 3))
    receiver._plan = plan
    for seed in (3, 2):
        refit(engine, weights("gpt_oss", seed))
        assert_like_a_fresh_engine(engine, "gpt_oss", seed)


def test_a_head_that_is_tied_to_the_embedding(engines: Any) -> None:
    """The embedding's reload does not pack the head's copy again."""
    engine = engines("llama")
    refit(engine, weights("llama", 2))
    without(engine, "tied_head")
    refit(engine, weights("llama", 3), verify=False)
    assert answers(engine).same_tokens(loaded_from_disk("llama", 3)) < NUM_GREEDY // 2
    engine.receiver()._derived = registry()
    (stale,) = [one for one in engine.receiver().derived() if one.entry == "tied_head"]
    assert stale.num_changed == 1
    check = behaviour(engine, "llama", 3)
    assert check().status == "failed"
    check.before()
    receipt = refit(engine, weights("llama", 3), behaves=check)
    assert_behaves(receipt)
    assert report(receipt, "tied_head").num_changed == 1
    assert_like_a_fresh_engine(engine, "llama", 3)
    assert report(refit(engine, weights("llama", 3)), "tied_head").num_changed == 0, "nothing was stale"


def test_absorbed_projections_are_seen_by_decode_alone(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention  # pyright: ignore

    engine = engines("deepseek_v3")
    refit(engine, weights("deepseek_v3", 2))
    layers = [module for module in served_model(engine.llm).modules() if isinstance(module, MLAAttention)]
    for layer in layers:  # of plain weights they are views; a quantised kv_b_proj gives copies
        layer.W_UV = torch.nn.Parameter(layer.W_UV.detach().clone(), requires_grad=False)
        layer.W_UK_T = torch.nn.Parameter(layer.W_UK_T.detach().clone(), requires_grad=False)
    places = [(layer.W_UV.data_ptr(), layer.W_UK_T.data_ptr()) for layer in layers]
    monkeypatch.setattr(MLAAttention, "process_weights_after_loading", lambda *arguments: None)
    without(engine, "mla_absorbed")
    refit(engine, weights("deepseek_v3", 3), verify=False)
    stale, reference = answers(engine), loaded_from_disk("deepseek_v3", 3)
    assert stale.difference(reference, "prefill") <= BOUND, "prefill can't see it"
    assert stale.difference(reference, "decode") > 1e-2
    failed = behaviour(engine, "deepseek_v3", 3)
    assert failed().status == "failed"
    assert failed.measured is not None
    assert failed.measured.prefill_mean <= BOUND < failed.measured.decode_mean
    engine.receiver()._derived = registry()
    receipt = refit(engine, weights("deepseek_v3", 3))
    found = report(receipt, "mla_absorbed")
    assert (found.num_states, found.num_changed) == (2 * len(layers), 2 * len(layers))
    assert_like_a_fresh_engine(engine, "deepseek_v3", 3)
    assert [(layer.W_UV.data_ptr(), layer.W_UK_T.data_ptr()) for layer in layers] == places
    assert_behaves(refit(engine, weights("deepseek_v3", 2), behaves=behaviour(engine, "deepseek_v3", 2)))


def test_rotary_tables_are_the_trainers_to_the_bit(engines: Any) -> None:
    """A table in bfloat16 on one side was the whole difference of an exact run (I11)."""
    engine, model = engines("qwen3"), tiny_model("qwen3")
    tables = [m.cos_sin_cache for m in served_model(engine.llm).modules() if hasattr(m, "cos_sin_cache")]
    assert tables
    for table in tables:
        cosines, sines = model.model.rotary_emb(torch.empty(1), torch.arange(len(table))[None])
        half = table.shape[1] // 2
        trainers = torch.cat([cosines[0, :, :half], sines[0, :, :half]], dim=1)
        assert table.dtype == trainers.dtype == torch.float32
        assert torch.equal(table, trainers)
        assert not torch.equal(table.bfloat16().float(), trainers)


def test_rotary_tables_that_deep_sleep_lost(engines: Any) -> None:
    engine = engines("qwen3_moe")
    loaded_from_disk("qwen3_moe", 2)  # engines of one process share the tables
    tables = {module.cos_sin_cache for module in served_model(engine.llm).modules() if hasattr(module, "cos_sin_cache")}
    without(engine, "rotary_cache")
    for table in tables:
        table.zero_()
    refit(engine, weights("qwen3_moe", 2), verify=False)
    assert answers(engine).difference(loaded_from_disk("qwen3_moe", 2), "prefill") > 1e-2
    check = behaviour(engine, "qwen3_moe", 2)
    assert check().status == "failed"
    check.before()
    engine.receiver()._derived = registry()
    receipt = refit(engine, weights("qwen3_moe", 2), behaves=check)
    assert_behaves(receipt)
    assert report(receipt, "rotary_cache").num_changed == len(tables)
    assert_like_a_fresh_engine(engine, "qwen3_moe", 2)
    engine.sleep(level=1)
    for table in tables:
        table.zero_()
    engine.wake()
    assert_like_a_fresh_engine(engine, "qwen3_moe", 2)


@pytest.mark.parametrize("times", [0, 2])
def test_a_layout_applied_twice_or_not_at_all(engines: Any, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Shape and dtype stay, and so does a digest of what was sent: a second load and behaviour see it."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe  # pyright: ignore[reportMissingImports]

    engine = engines("qwen3_moe")
    pack = cpu_moe.cpu_prepack_moe_weight
    with monkeypatch.context() as patch:
        patch.setattr(cpu_moe, "cpu_prepack_moe_weight", lambda w, isa: w if not times else pack(pack(w, isa), isa))
        refit(engine, weights("qwen3_moe", 3), verify=False)
    assert answers(engine).same_tokens(loaded_from_disk("qwen3_moe", 3)) < NUM_GREEDY // 2
    sent = {name: tensor for name, _, _, tensor in weights("qwen3_moe", 3).shards()}
    receiver = engine.receiver()
    different = {
        name
        for name, found in receiver.reload_differences((n, sent[n]) for n in receiver.opaque())
        if found is not None
    }
    assert different == {name for name in sent if ".experts." in name}
    check = behaviour(engine, "qwen3_moe", 3)
    assert check().status == "failed"
    check.before()
    assert_behaves(refit(engine, weights("qwen3_moe", 3), behaves=check))
    assert_like_a_fresh_engine(engine, "qwen3_moe", 3)


def test_a_prefix_cache_that_outlives_the_weights(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines("qwen3_moe")
    prompt = [5 + i % 50 for i in range(200)]
    asked = [request("long", prompt, temperature=0.0, max_new_tokens=32)]

    def served(seed: int) -> list[int]:
        refit(engine, weights("qwen3_moe", seed), verify=False)
        return run(engine, asked)[0].tokens.tolist()

    expected = served(3)
    served(2)
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm.llm_engine, "reset_prefix_cache", lambda *arguments, **options: True)
        kept = served(3)
    assert kept != expected, "keys of the old weights were served"
    served(2)
    assert served(3) == expected


def expert_parallel(layer: Any, rank: int, size: int = 2) -> Any:
    """A copy of a real expert layer as rank ``rank`` of ``size`` would have it: vLLM's own map manager and loaders,
    without the processes."""
    from types import SimpleNamespace

    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager  # pyright: ignore

    parallel = SimpleNamespace(use_ep=True, ep_size=size, ep_rank=rank, tp_size=1, tp_rank=0, dp_size=1)
    parallel.use_all2all_kernels = parallel.needs_round_robin_routing_tables = False
    manager = ExpertMapManager(64, 2, 8, 0, None, parallel, "linear", False)
    mine = shallow_copy(layer)
    mine.expert_map_manager = manager
    mine.update_expert_map_info()
    for name, shape in (("w13_weight", (4, 128, 64)), ("w2_weight", (4, 64, 64))):
        parameter = torch.nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)
        parameter.weight_loader = mine.weight_loader  # pyright: ignore[reportAttributeAccessIssue]
        mine._parameters[name] = parameter
    return mine


@pytest.mark.parametrize("rank", [0, 1])
def test_zeroed_expert_maps_send_every_expert_to_slot_0(engines: Any, rank: int) -> None:
    """A dummy start zeroes integer buffers on ROCm. Real map, real loader; no second process, since expert parallel
    does not run on a CPU."""
    engine = engines("qwen3_moe")
    path, layer = next((p, m) for p, m in served_model(engine.llm).named_modules() if "expert_map_manager" in vars(m))
    mine = expert_parallel(layer, rank)
    group = path.removesuffix(".routed_experts")
    sent = [(name, tensor) for name, _, _, tensor in weights("qwen3_moe", 2).shards() if name.startswith(group)]
    assert len(sent) == 24
    right = mine.expert_map_manager._expert_map.clone()
    mine.expert_map_manager._expert_map.zero_()
    list(mine.load_weights([(name.removeprefix(f"{group}."), tensor) for name, tensor in sent]))
    assert torch.isnan(mine.w2_weight[1:]).all(), "without the entry everything lands in slot 0"

    (found,) = registry().before_plan(mine)
    assert (found.entry, found.num_states, found.num_changed) == ("moe_expert_map", 1, 1)
    assert torch.equal(mine.expert_map_manager._expert_map, right)
    assert mine._expert_map.data_ptr() == mine.expert_map_manager._expert_map.data_ptr()
    list(mine.load_weights([(name.removeprefix(f"{group}."), tensor) for name, tensor in sent]))
    for slot in range(4):
        expected = dict(sent)[f"{group}.{4 * rank + slot}.down_proj.weight"]
        assert torch.equal(mine.w2_weight[slot], expected)
    assert registry().before_plan(mine)[0].num_changed == 0


def test_expert_masks_and_maps_with_fused_shared_experts_are_rebuilt_once() -> None:
    """vLLM's own recalculation would count the shared experts twice."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import (  # pyright: ignore
        ExpertMapManager,
        determine_expert_map,
    )

    manager = object.__new__(ExpertMapManager)
    manager.moe_parallel_config = torch.nn.Module()
    for name, value in {"ep_size": 2, "ep_rank": 1, "use_ep": True}.items():
        setattr(manager.moe_parallel_config, name, value)
    manager.global_num_experts, manager.num_fused_shared_experts, manager.rocm_aiter_enabled = 8, 1, True
    manager._placement_strategy, manager._routing_tables = "linear", None
    manager._calculate_expert_maps()
    module = torch.nn.Module()
    module.expert_map_manager = manager
    module.register_buffer("_expert_map", manager._expert_map, persistent=False)
    module.register_buffer("expert_mask", manager._expert_mask, persistent=False)
    _, expert_map, mask = determine_expert_map(2, 1, 8, "linear", 1, True)
    module._expert_map.zero_()
    module.expert_mask.zero_()
    (found,) = registry().before_plan(module)
    assert (found.num_states, found.num_changed) == (2, 2)
    assert torch.equal(module._expert_map, expert_map)
    assert torch.equal(module.expert_mask, mask)
    assert registry().check(module)[0].num_changed == 0


def test_the_rocm_copy_of_wo_a_is_rebuilt_in_place_by_vllms_own_function() -> None:
    """The function is the real one; no ROCm device runs here."""
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import _get_cached_wo_a_bf16  # pyright: ignore

    wo_a = torch.nn.Module()
    wo_a.weight = torch.nn.Parameter(torch.randn(2 * 16, 32))
    cached = _get_cached_wo_a_bf16(wo_a, 2, 16, 32)
    with torch.no_grad():
        wo_a.weight.mul_(2)
    assert torch.equal(_get_cached_wo_a_bf16(wo_a, 2, 16, 32), cached), "stale without the entry"
    entries = Registry(entry for entry in registry().entries if entry.name == "dsv4_wo_a_bf16")
    (found,) = entries.after_load(wo_a)
    assert (found.num_states, found.num_changed) == (1, 1)
    assert _get_cached_wo_a_bf16(wo_a, 2, 16, 32) is cached
    assert torch.equal(cached, wo_a.weight.detach().view(2, 16, 32).to(torch.bfloat16))


def noting(receiver: Any, ran: list[tuple[str, bool, bool]]) -> Registry:
    """The registry of a run with a stale state in every phase, which notes when it is looked at: whether the loader was
    asked about the manifest, and whether a tensor has come."""

    def entry(phase: Any) -> TensorEntry:
        live = torch.zeros(1)

        def states(_: Any) -> Iterator[DerivedTensor]:
            ran.append((phase, receiver._plan is not None, bool(receiver._received)))
            yield DerivedTensor(phase, live, live + 1)

        return TensorEntry(f"noted_{phase}", phase, 99, "nothing", states)

    return Registry([*registry().entries, *map(entry, ("before_plan", "before_load", "after_load"))])


def test_every_phase_runs_in_its_place_and_is_in_the_receipt(engines: Any) -> None:
    """One worker has no expert map that could be wrong. What counts here: its entry runs before the loader is asked,
    which consults it, and after a wake too."""
    engine = engines("qwen3_moe")
    receiver = engine.receiver()
    ran: list[tuple[str, bool, bool]] = []
    receiver._plan, receiver._planned, receiver._received = None, (), set()
    receiver._derived = noting(receiver, ran)
    receipt = refit(engine, weights("qwen3_moe", 3), verify=False)
    assert ran == [("before_plan", False, False), ("before_load", True, False), ("after_load", True, True)]
    changed = {one.entry for one in receipt.derived if one.num_changed}
    assert changed >= {"noted_before_plan", "noted_before_load", "noted_after_load"}
    ran.clear()
    engine.sleep(level=1)
    engine.wake()
    assert [phase for phase, _, _ in ran] == ["before_plan", "after_load"]
    ran.clear()
    stale = {one.entry for one in receiver.derived() if one.num_changed}
    assert {phase for phase, _, _ in ran} == {"before_plan", "before_load", "after_load"}
    assert stale == {"noted_before_plan", "noted_before_load", "noted_after_load"}


def test_cache_scales_are_brought_back(engines: Any) -> None:
    engine = engines("qwen3_moe")
    refit(engine, weights("qwen3_moe", 2))
    layer = next(module for module in served_model(engine.llm).modules() if hasattr(module, "_k_scale"))
    layer._k_scale.fill_(3.0)
    layer._v_scale_float = 7.0
    receiver = engine.receiver()
    for reports in (receiver.derived(), receiver.refresh_after_wake()):
        (found,) = [one for one in reports if one.entry == "kv_scales"]
        assert (found.num_states, found.num_changed) == (4, 2)
    assert float(layer._k_scale) == layer._v_scale_float == 1.0


class Fp8LinearMethod:
    """Stands for vLLM's, which needs other hardware: the entry goes by the name."""


def test_a_half_loaded_fp8_scale_is_an_error() -> None:
    """Staging starts as NaN in every floating type, so what a loader left out shows."""
    layer = torch.nn.Module()
    layer.quant_method = Fp8LinearMethod()
    layer.weight = torch.nn.Parameter(torch.empty(4, 4, dtype=torch.float8_e4m3fn), requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    layer.weight.data.view(torch.uint8).zero_()
    assert ScaleEntry().refresh(layer).num_states == 2
    poison(layer.weight_scale_inv.data)
    layer.weight_scale_inv.data[0] = 1.0
    with pytest.raises(DerivedStateError, match=r"fp8_layout: 1 tensors were loaded in part: .*weight_scale_inv"):
        ScaleEntry().refresh(layer)
    layer.weight_scale_inv.data.fill_(1.0)
    poison(layer.weight.data)
    assert ScaleEntry().check(layer).num_changed == 1


@pytest.mark.parametrize("backend", ["TRITON", "FLASHINFER_TRTLLM_MXFP4_BF16", *MXFP4_REFITTABLE])
def test_mxfp4_back_ends_outside_the_list_are_refused_with_the_list(backend: str) -> None:
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend  # pyright: ignore

    layer = torch.nn.Module()
    layer.quant_method = torch.nn.Module()
    layer.quant_method.mxfp4_backend = Mxfp4MoeBackend[backend]
    refusals = registry().refusals(layer)
    if backend in MXFP4_REFITTABLE:
        assert refusals == ()
    else:
        assert backend in refusals[0]
        assert all(name in refusals[0] for name in MXFP4_REFITTABLE)


def test_rebalanced_experts_and_undeclared_drafters_are_refused(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines("qwen3_moe")
    refit(engine, weights("qwen3_moe", 2))
    before = greedy_tokens(engine, 2)
    layer = next(m for m in served_model(engine.llm).modules() if "expert_map_manager" in vars(m))
    with monkeypatch.context() as patch:
        patch.setattr(layer.moe_config.moe_parallel_config, "enable_eplb", True)
        with pytest.raises(RefitError, match=r"moe_expert_map: .*EPLB"):
            refit(engine, weights("qwen3_moe", 3))
    drafter = torch.nn.Module()
    drafter.model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(model_runner(engine.llm), "drafter", drafter, raising=False)
    with pytest.raises(RefitError, match="drafter: the engine drafts with a model"):
        refit(engine, weights("qwen3_moe", 3))
    assert greedy_tokens(engine, 2) == before
    engine.receiver()._derived = registry(drafter="frozen")
    found = report(refit(engine, weights("qwen3_moe", 2)), "drafter")
    assert (found.num_states, found.num_changed, found.detail) == (2, 0, "declared frozen")
