"""Derived state of vLLM's CPU build: what it packs for its kernels, and where a reload does not pack again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.records import DerivedReport
from lockstep.refit.derived import Phase, equal_bits, named
from lockstep.refit.derived_vllm_parts import modules, on_cpu
from lockstep.rollout.vllm_reload import shallow_copy

_PROBE_ROWS = 4


@dataclass(frozen=True)
class KernelLayoutEntry:
    """vLLM 0.32 on a CPU packs unquantised experts when it builds their kernel, and takes an existing kernel for a sign
    that this was done: a reload would leave checkpoint bytes where packed ones are read. Without its kernel a layer is
    packed again. On CUDA the reload is right as it is, and this mend a crash."""

    name: str = "moe_kernel_layout"
    phase: Phase = "before_load"
    order: int = 10
    sources: str = "expert weights"

    def refusal(self, engine: Any) -> str | None:
        """Never refuses."""
        return None

    def applies(self, engine: Any) -> bool:
        """On a CPU, to unquantised experts."""
        return on_cpu(engine) and any(True for _ in self._methods(engine))

    def refresh(self, engine: Any) -> DerivedReport:
        """Drop kernels that would make the reload skip its packing."""
        methods = list(self._methods(engine))
        stale = [path for path, method in methods if method.moe_kernel is not None]
        for _, method in methods:
            method.moe_kernel = None
        return DerivedReport(self.name, len(methods), len(stale), "kernels dropped, to be built from the new weights")

    def check(self, engine: Any) -> DerivedReport:
        """A layer whose kernel was not built again. The packed bytes themselves are compared by a second load (claim
        ``loaded``)."""
        methods = list(self._methods(engine))
        absent = [path for path, method in methods if method.moe_kernel is None]
        return DerivedReport(self.name, len(methods), len(absent), named(absent))

    def _methods(self, engine: Any) -> Iterator[tuple[str, Any]]:
        for path, module in modules(engine):
            method = getattr(module, "quant_method", None)
            backend = getattr(getattr(method, "unquantized_backend", None), "value", None)
            if backend == "CPU" and hasattr(method, "moe_kernel"):
                yield path, method


@dataclass(frozen=True)
class PackedHeadEntry:
    """On a CPU the output head multiplies by a packed copy of its weight. The reload packs anew what it loads; a head
    that is tied to the embedding is not loaded by itself, so its copy stays the old policy's."""

    name: str = "tied_head"
    phase: Phase = "after_load"
    order: int = 50
    sources: str = "the head's weight, which may be the embedding's"

    def refusal(self, engine: Any) -> str | None:
        """Never refuses."""
        return None

    def applies(self, engine: Any) -> bool:
        """On a CPU."""
        return on_cpu(engine) and any(True for _ in self._heads(engine))

    def refresh(self, engine: Any) -> DerivedReport:
        """Pack anew where the copy gives other products than the weight."""
        return self._run(engine, write=True)

    def check(self, engine: Any) -> DerivedReport:
        """Count heads whose copy gives other products."""
        return self._run(engine, write=False)

    def _heads(self, engine: Any) -> Iterator[tuple[str, Any]]:
        for path, module in modules(engine):
            is_head = any(kind.__name__ == "ParallelLMHead" for kind in type(module).__mro__)
            if is_head and callable(getattr(module, "cpu_linear", None)) and module.weight.numel():  # pyright: ignore
                yield path, module

    def _run(self, engine: Any, *, write: bool) -> DerivedReport:
        heads, changed = list(self._heads(engine)), []
        for path, head in heads:
            fresh = shallow_copy(head)
            fresh.quant_method.process_weights_after_loading(fresh)
            size = head.weight.shape[1]
            generator = torch.Generator().manual_seed(0)
            rows = torch.randn(_PROBE_ROWS, size, generator=generator).to(head.weight.dtype)
            bias = getattr(head, "bias", None)
            products = [one.cpu_linear(rows, one.weight, bias) for one in (head, fresh)]
            if not equal_bits(*products):
                changed.append(path)
                if write:
                    head.cpu_linear = fresh.cpu_linear
        return DerivedReport(self.name, len(heads), len(changed), named(changed))
