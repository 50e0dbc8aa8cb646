"""The short way into live weights: the same bytes at the same addresses, or shut."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from lockstep.rollout.vllm_coverage import Geometry, Write
from lockstep.rollout.vllm_direct import DirectCopy
from lockstep.rollout.vllm_layout import LiveLayout
from lockstep.rollout.vllm_plan import LoadPlan

EXPERTS, INNER, WIDTH = 3, 4, 6


class Served(torch.nn.Module):
    """As vLLM keeps them: q, k and v in one parameter, gate and up of all experts in another."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.experts = torch.nn.Module()
        self.experts.w13 = torch.nn.Parameter(torch.full((EXPERTS, 2 * INNER, WIDTH), torch.nan))
        torch.nn.init.constant_(self.qkv.weight, torch.nan)


def rows(tensor: torch.Tensor, start: int, stop: int, index: int | None = None) -> Geometry:
    view = tensor[start:stop] if index is None else tensor[index, start:stop]
    return tuple(view.shape), tuple(view.stride()), view.storage_offset()


def whole(shape: tuple[int, ...]) -> Geometry:
    return shape, torch.empty(shape).stride(), 0


SQUARE = whole((WIDTH, WIDTH))


def make(model: Served, source: Geometry | None = SQUARE) -> tuple[LiveLayout, dict[str, torch.Tensor]]:
    """The layout that a dry load would have noted, and a checkpoint to load."""
    targets = {"qkv.weight": model.qkv.weight, "experts.w13": model.experts.w13}
    writes: dict[str, tuple[Write, ...]] = {
        name: (Write("qkv.weight", rows(model.qkv.weight, i * WIDTH, (i + 1) * WIDTH), source, True),)
        for i, name in enumerate(("q", "k", "v"))
    }
    for expert in range(EXPERTS):
        for half, name in enumerate(("gate", "up")):
            region = rows(model.experts.w13, half * INNER, (half + 1) * INNER, expert)  # pyright: ignore
            writes[f"{expert}.{name}"] = (Write("experts.w13", region, whole((INNER, WIDTH)), True),)
    shapes = {name: (WIDTH, WIDTH) if len(name) == 1 else (INNER, WIDTH) for name in writes}
    layers = {name: frozenset(write.target.rpartition(".")[0] for write in found) for name, found in writes.items()}
    unit = {name: sorted(map(sorted, set(layers.values()))).index(sorted(paths)) for name, paths in layers.items()}
    plan = LoadPlan(
        writes=writes, targets=targets, shapes=shapes, layers=layers, unit=unit, unit_size=Counter(unit.values()),
        bypassed=frozenset(), padded=frozenset(), elsewhere=frozenset(),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    checkpoint = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    reload: Any = None  # for a second load, which is not made here
    return LiveLayout(model, plan, reload), checkpoint


def test_every_tensor_arrives_in_its_place_and_no_address_moves() -> None:
    model = Served()
    layout, checkpoint = make(model)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    direct = DirectCopy.of(layout)
    assert direct is not None
    sent = {name: tensor.T.contiguous().T if name == "k" else tensor for name, tensor in checkpoint.items()}
    assert not sent["k"].is_contiguous()
    names = list(sent)
    direct.copy((name, sent[name]) for name in names[:4])  # two buckets
    direct.copy((name, sent[name]) for name in names[4:])
    assert torch.equal(model.qkv.weight, torch.cat([checkpoint["q"], checkpoint["k"], checkpoint["v"]]))
    stacked = [torch.cat([checkpoint[f"{e}.gate"], checkpoint[f"{e}.up"]]) for e in range(EXPERTS)]
    assert torch.equal(model.experts.w13, torch.stack(stacked))  # pyright: ignore[reportArgumentType]
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert {name: tensor for name, tensor in layout.live() if not torch.equal(tensor, checkpoint[name])} == {}


def test_a_wider_type_is_rounded_on_arrival() -> None:
    model = Served().bfloat16()
    layout, checkpoint = make(model)
    direct = DirectCopy.of(layout)
    assert direct is not None
    direct.copy(checkpoint.items())
    assert torch.equal(model.qkv.weight[:WIDTH], checkpoint["q"].bfloat16())


class Attention(torch.nn.Module):
    """As vLLM's: it hands post-processing on to its back end."""

    def __init__(self, impl: Any) -> None:
        super().__init__()
        self.impl = impl

    def process_weights_after_loading(self, _dtype: torch.dtype) -> None: ...


class AttentionImplBase:
    def process_weights_after_loading(self, _dtype: torch.dtype) -> None: ...


class PlainBackend(AttentionImplBase):
    pass


class BackendWithCopies(AttentionImplBase):
    def process_weights_after_loading(self, _dtype: torch.dtype) -> None: ...


@pytest.mark.parametrize(("impl", "is_open"), [(PlainBackend(), True), (BackendWithCopies(), False)])
def test_it_is_shut_where_attention_derives_more_after_loading(impl: Any, is_open: bool) -> None:
    model = Served()
    model.attention = Attention(impl)
    layout, _ = make(model)
    assert (DirectCopy.of(layout) is not None) == is_open


def test_replaced_parameters_are_seen_by_their_addresses() -> None:
    model = Served()
    layout, _ = make(model)
    before = layout.addresses()
    assert set(before) == {"qkv.weight", "experts.w13"}
    model.qkv.weight = torch.nn.Parameter(model.qkv.weight.detach().clone())
    assert layout.addresses() != before


@pytest.mark.parametrize("why", ["re-packed", "computed on the way", "unknown quantisation", "strided"])
def test_it_is_shut_where_a_copy_would_not_do(why: str) -> None:
    model = Served()
    layout, _ = make(model, None if why == "computed on the way" else SQUARE)
    if why == "re-packed":
        model.qkv.weight = torch.nn.Parameter(torch.empty(0))
    elif why == "unknown quantisation":
        model.qkv.quant_method = object()  # pyright: ignore[reportArgumentType]
    elif why == "strided":
        model.qkv.weight = torch.nn.Parameter(torch.empty(WIDTH, 3 * WIDTH).T)
    layout = LiveLayout(model, layout._plan, layout._reload)
    assert DirectCopy.of(layout) is None


class Kernel:
    def __init__(self, value: str) -> None:
        self.value = value


class UnquantizedFusedMoEMethod(torch.nn.Module):
    """As vLLM's: a method that is a module as well, and so stands below its layer among the model's modules."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.unquantized_backend = Kernel(kernel)

    def process_weights_after_loading(self, _layer: torch.nn.Module) -> None: ...


@pytest.mark.parametrize(("kernel", "is_open"), [("TRITON", True), ("AITER", False)])
def test_a_method_that_is_a_module_is_judged_by_the_layout_that_it_left(kernel: str, is_open: bool) -> None:
    model = Served()
    model.experts.quant_method = UnquantizedFusedMoEMethod(kernel)
    assert model.experts.quant_method in set(model.modules())
    layout, _ = make(model)
    assert (DirectCopy.of(layout) is not None) is is_open
