"""vLLM's derived state, entry by entry. Nothing here imports vLLM before an engine exists.

An entry applies where it was shown to be right, no wider: the same mend that saves one build can crash another.
``registry()`` is what a receiver gets. Engines are ``vllm.LLM`` objects; a bare module stands for its model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lockstep.records import DerivedReport
from lockstep.refit.derived import (
    DerivedStateError,
    DerivedTensor,
    Entry,
    Phase,
    RefusalEntry,
    Registry,
    TensorEntry,
    named,
)
from lockstep.refit.derived_vllm_cpu import KernelLayoutEntry, PackedHeadEntry
from lockstep.refit.derived_vllm_parts import drafter_model, modules, on_cpu
from lockstep.rollout.vllm_hooks import served_model
from lockstep.rollout.vllm_reload import shallow_copy

MXFP4_REFITTABLE = ("DEEPGEMM_MXFP4", "MARLIN", "BATCHED_MARLIN", "AITER_MXFP4_BF16")
"""Back ends whose conversion is a pure function of the checkpoint layout and publishes through ``replace_parameter``:
only those can be replayed."""


def registry(drafter: Literal["frozen"] | None = None) -> Registry:
    """All entries. ``drafter`` "frozen" declares that a speculative drafter keeps its weights; without a declaration an
    engine that has one is refused."""
    entries: list[Entry] = [
        TensorEntry(
            "moe_expert_map", "before_plan", 0, "the parallel layout", _expert_maps, _has_expert_maps, _rebalanced
        ),
        KernelLayoutEntry(),
        RefusalEntry("mxfp4_layout", "expert weights and scales", _mxfp4_refusal),
        RefusalEntry("model_post_load", "whatever the model derives as a whole", _post_load_refusal),
        DrafterEntry(drafter),
        ScaleEntry(),
        TensorEntry("mla_absorbed", "after_load", 20, "kv_b_proj", _absorbed, _has(("W_UV", "kv_b_proj"))),
        KvScaleEntry(),
        TensorEntry("dsv4_wo_a_bf16", "after_load", 40, "wo_a and its scales", _wo_a, _has(("_dsv4_wo_a_bf16",))),
        PackedHeadEntry(),
        TensorEntry("rotary_cache", "after_load", 60, "the configuration", _rotary, on_cpu),
    ]
    return Registry(entries)


def _has(names: tuple[str, ...]) -> Any:
    def applicable(engine: Any) -> bool:
        return any(all(getattr(module, name, None) is not None for name in names) for _, module in modules(engine))

    return applicable


# --- what the loader consults -----------------------------------------------------------------------------------------


def _experts(engine: Any) -> Iterator[tuple[str, Any]]:
    """Modules that place experts: those with an expert-map manager of their own."""
    return ((path, module) for path, module in modules(engine) if "expert_map_manager" in vars(module))


def _has_expert_maps(engine: Any) -> bool:
    return any(True for _ in _experts(engine))


def _expert_maps(engine: Any) -> Iterator[DerivedTensor]:
    """Maps and masks as the layout gives them. vLLM's own ``_calculate_expert_maps`` is not replayed: it counts fused
    shared experts a second time."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import (  # pyright: ignore[reportMissingImports]
        determine_expert_map,
    )

    for path, module in _experts(engine):
        manager = module.expert_map_manager
        _, expert_map, expert_mask = determine_expert_map(
            ep_size=manager.ep_size,
            ep_rank=manager.ep_rank,
            global_num_experts=manager.global_num_experts,
            expert_placement_strategy=manager.placement_strategy,
            num_fused_shared_experts=manager.num_fused_shared_experts,
            return_expert_mask=manager.rocm_aiter_enabled,
        )
        owned = {"_expert_map": expert_map, "expert_mask": expert_mask}
        if manager.routing_tables is not None:
            tables = ("expert_global_to_physical", "expert_physical_to_global", "expert_local_to_global")
            owned |= dict(zip(tables, manager._init_routing_tables(), strict=True))
        for name, rebuilt in owned.items():
            for holder, live in (("", getattr(module, name, None)), ("manager.", _in_manager(manager, name))):
                if live is not None and rebuilt is not None:
                    yield DerivedTensor(f"{path}.{holder}{name}", live, rebuilt)


def _in_manager(manager: Any, name: str) -> torch.Tensor | None:
    return getattr(manager, name if name.startswith("_") else f"_{name}", None)


def _rebalanced(engine: Any) -> str | None:
    for path, module in _experts(engine):
        parallel = getattr(getattr(module, "moe_config", None), "moe_parallel_config", None)
        if getattr(parallel, "enable_eplb", False):
            return (
                f"{path}: experts are rebalanced while the engine runs (EPLB), so their map is no function of the "
                "layout and can't be rebuilt; start the engine without it"
            )
    return None


# --- what can't be refreshed ------------------------------------------------------------------------------------------


def _mxfp4_refusal(engine: Any) -> str | None:
    for path, module in modules(engine):
        backend = getattr(getattr(module, "quant_method", None), "mxfp4_backend", None)
        name = getattr(backend, "value", backend)
        if name is not None and name not in MXFP4_REFITTABLE:
            return (
                f"{path}: mxfp4 back end {name} can't be refitted, since its conversion is not known to be a function "
                "of the checkpoint's layout that is published in place; those that can: " + ", ".join(MXFP4_REFITTABLE)
            )
    return None


def _post_load_refusal(engine: Any) -> str | None:
    model = engine if isinstance(engine, torch.nn.Module) else served_model(engine)
    if callable(getattr(model, "process_weights_after_loading", None)):
        return (
            f"{type(model).__name__} post-processes its weights as a whole after loading, which vLLM's layer-wise "
            "reload does not repeat; not shown to be repeatable"
        )
    return None


@dataclass(frozen=True)
class DrafterEntry:
    """A speculative drafter must not quietly serve an old policy's head: its owner says that it is frozen."""

    declared: Literal["frozen"] | None
    name: str = "drafter"
    phase: Phase = "after_load"
    order: int = 0
    sources: str = "the drafter's own weights"

    def refusal(self, engine: Any) -> str | None:
        """An undeclared drafter is refused."""
        if drafter_model(engine) is None or self.declared == "frozen":
            return None
        return "the engine drafts with a model that this refit does not bring: declare it frozen, or start without it"

    def applies(self, engine: Any) -> bool:
        """To engines that have one."""
        return drafter_model(engine) is not None

    def refresh(self, engine: Any) -> DerivedReport:
        """Report it as frozen."""
        model = drafter_model(engine)
        count = 0 if model is None else sum(1 for _ in model.parameters())
        return DerivedReport(self.name, count, 0, "declared frozen")

    def check(self, engine: Any) -> DerivedReport:
        """The same."""
        return self.refresh(engine)


# --- what is computed from the weights --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleEntry:
    """Layers in fp8: staging starts as NaN, so a scale or weight that a loader left out is NaN after the fold."""

    name: str = "fp8_layout"
    phase: Phase = "after_load"
    order: int = 10
    sources: str = "fp8 weights and their scales"

    def refusal(self, engine: Any) -> str | None:
        """Never refuses."""
        return None

    def applies(self, engine: Any) -> bool:
        """To layers with a quantisation method for fp8."""
        return any(True for _ in self._tensors(engine))

    def refresh(self, engine: Any) -> DerivedReport:
        """Nothing to rebuild here: raises DerivedStateError for what was not loaded."""
        report = self.check(engine)
        if report.num_changed:
            raise DerivedStateError(f"{self.name}: {report.num_changed} tensors were loaded in part: {report.detail}")
        return report

    def check(self, engine: Any) -> DerivedReport:
        """Count tensors with a value that is not finite."""
        tensors = list(self._tensors(engine))
        broken = [name for name, tensor in tensors if not bool(torch.isfinite(tensor.float()).all())]
        return DerivedReport(self.name, len(tensors), len(broken), named(broken))

    def _tensors(self, engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for path, module in modules(engine):
            if "fp8" in type(getattr(module, "quant_method", None)).__name__.lower():
                for name, tensor in module._parameters.items():
                    if tensor is not None and tensor.is_floating_point() and tensor.numel():
                        yield f"{path}.{name}", tensor


def _absorbed(engine: Any) -> Iterator[DerivedTensor]:
    """MLA's decode path multiplies by parts of ``kv_b_proj`` that were cut out after loading; its prefill does not, so
    prefill probes can't see them stale."""
    from vllm.model_executor.layers.attention.mla_attention import split_kv_b_proj  # pyright: ignore

    for path, module in modules(engine):
        up = getattr(module, "W_UV", None)
        if not isinstance(up, torch.Tensor) or not hasattr(module, "kv_b_proj"):
            continue
        attention: Any = module
        w_uk, w_uv = split_kv_b_proj(
            attention.kv_b_proj,
            up.dtype,
            attention.kv_lora_rank,
            attention.num_heads,
            attention.qk_nope_head_dim,
            attention.v_head_dim,
        )
        yield DerivedTensor(f"{path}.W_UV", up, w_uv.transpose(0, 1))
        yield DerivedTensor(f"{path}.W_UK_T", attention.W_UK_T, w_uk.permute(1, 2, 0))


@dataclass(frozen=True)
class KvScaleEntry:
    """Scales of the key and value cache: kernels read host copies of the device's, and 1 where the cache is not fp8."""

    name: str = "kv_scales"
    phase: Phase = "after_load"
    order: int = 30
    sources: str = "k_scale, v_scale and q_scale of the attention layers"

    def refusal(self, engine: Any) -> str | None:
        """Never refuses."""
        return None

    def applies(self, engine: Any) -> bool:
        """To attention layers that keep scales."""
        return any(True for _ in self._layers(engine))

    def refresh(self, engine: Any) -> DerivedReport:
        """Set the scales of unquantised caches to 1 and every host copy to its device's value."""
        return self._run(engine, write=True)

    def check(self, engine: Any) -> DerivedReport:
        """Count scales that differ."""
        return self._run(engine, write=False)

    def _layers(self, engine: Any) -> Iterator[tuple[str, Any]]:
        return ((path, m) for path, m in modules(engine) if hasattr(m, "_k_scale") and hasattr(m, "_k_scale_float"))

    def _run(self, engine: Any, *, write: bool) -> DerivedReport:
        count, changed = 0, []
        for path, layer in self._layers(engine):
            plain = not str(getattr(layer, "kv_cache_dtype", "auto")).startswith("fp8")
            for letter in ("k", "v"):
                device, host = getattr(layer, f"_{letter}_scale"), f"_{letter}_scale_float"
                wanted = 1.0 if plain else float(device.float().max())
                count += 1
                stale = float(device.float().max()) != wanted or getattr(layer, host) != wanted
                if stale:
                    changed.append(f"{path}._{letter}_scale")
                    if write:
                        device.fill_(wanted)
                        setattr(layer, host, wanted)
        return DerivedReport(self.name, count, len(changed), named(changed))


def _wo_a(engine: Any) -> Iterator[DerivedTensor]:
    """ROCm multiplies by a bfloat16 copy of ``wo_a`` that is made once and kept on the module. Rebuilt by vLLM's own
    function, with the copy out of its sight."""
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import _get_cached_wo_a_bf16  # pyright: ignore

    for path, module in modules(engine):
        cached = getattr(module, "_dsv4_wo_a_bf16", None)
        if cached is None:
            continue
        bare = shallow_copy(module)
        bare.__dict__.pop("_dsv4_wo_a_bf16", None)
        bare._buffers.pop("_dsv4_wo_a_bf16", None)
        yield DerivedTensor(f"{path}._dsv4_wo_a_bf16", cached, _get_cached_wo_a_bf16(bare, *cached.shape))


def _rotary(engine: Any) -> Iterator[DerivedTensor]:
    """Tables of the rotary embedding: a function of the configuration, lost by deep sleep."""
    for path, module in modules(engine):
        table: Any = getattr(module, "cos_sin_cache", None)
        compute: Any = getattr(module, "_compute_cos_sin_cache", None)
        if isinstance(table, torch.Tensor) and callable(compute):
            with table.device:
                yield DerivedTensor(f"{path}.cos_sin_cache", table, compute())  # pyright: ignore[reportArgumentType]
