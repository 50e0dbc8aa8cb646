"""The short way into live weights: the same bytes at the same addresses, or shut."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.records import Original, TensorSpec
from lockstep.rollout.receiver import RefitRefused
from lockstep.rollout.vllm_coverage import Geometry, Write
from lockstep.rollout.vllm_direct import DirectCopy
from lockstep.rollout.vllm_layout import LiveLayout
from lockstep.rollout.vllm_plan import LoadPlan
from lockstep.rollout.vllm_receiver import _Originals

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


def stacks(checkpoint: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Original]]:
    """The checkpoint as a trainer holds it: all experts' gates and ups in one tensor; and what lies where in it."""
    pair = (INNER, WIDTH)
    names = [f"{expert}.{half}" for expert in range(EXPERTS) for half in ("gate", "up")]
    stack = torch.stack([checkpoint[name] for name in names]).view(EXPERTS, 2 * INNER, WIDTH)
    tensors = {name: tensor for name, tensor in checkpoint.items() if len(name) == 1} | {"stack": stack}
    parts = {"stack": [(name, (pair, (WIDTH, 1), index * INNER * WIDTH)) for index, name in enumerate(names)]}
    parts |= {name: [(name, SQUARE)] for name in "qkv"}
    originals = {
        name: Original(TensorSpec(name, tuple(tensor.shape), "float32", name), tuple(parts[name]), frozenset(
            part for part, _ in parts[name]
        ))
        for name, tensor in tensors.items()
    }  # fmt: skip
    return tensors, originals


@pytest.mark.parametrize("turned", [False, True])
def test_a_stack_is_one_copy_and_arrives_as_its_experts_would(turned: bool) -> None:
    model = Served()
    layout, checkpoint = make(model)
    direct = DirectCopy.of(layout)
    assert direct is not None
    tensors, originals = stacks(checkpoint)
    composed = direct.composed(originals)
    assert {name: len(pieces) for name, pieces in composed._pieces.items()} == {"q": 1, "k": 1, "v": 1, "stack": 1}
    before = [parameter.data_ptr() for parameter in model.parameters()]
    if turned:  # not contiguous
        tensors = {name: tensor.transpose(-1, -2).contiguous().transpose(-1, -2) for name, tensor in tensors.items()}
    composed.copy(tensors.items())
    assert {name: tensor for name, tensor in layout.live() if not torch.equal(tensor, checkpoint[name])} == {}
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def test_parts_that_lie_apart_at_one_end_are_copied_apart() -> None:
    """As where ups come before gates, or experts in another order: merging them would swap weights."""
    model = Served()
    layout, checkpoint = make(model)
    direct = DirectCopy.of(layout)
    assert direct is not None
    tensors, originals = stacks(checkpoint)
    names = [name for name, _ in originals["stack"].parts]
    order = [*reversed(names)]
    turned = torch.stack([checkpoint[name] for name in order]).view_as(tensors["stack"])
    places = [place for _, place in originals["stack"].parts]
    original = replace(originals["stack"], parts=tuple(zip(order, places, strict=True)))
    composed = direct.composed(originals | {"stack": original})
    assert len(composed._pieces["stack"]) == 2 * EXPERTS
    composed.copy((tensors | {"stack": turned}).items())
    assert {name: tensor for name, tensor in layout.live() if not torch.equal(tensor, checkpoint[name])} == {}


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


class Source:
    """A trainer's tensors in whatever state the test wants them."""

    def __init__(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors

    def shards(self) -> Any:
        for name, tensor in self._tensors:
            yield name, tuple(tensor.shape), (0,) * tensor.ndim, tensor


def arrive(tensors: list[tuple[str, torch.Tensor]], originals: dict[str, Original]) -> tuple[set[str], int]:
    received: set[str] = set()
    source: Any = Source(tensors)
    arrivals = _Originals(source, originals, received, version=7)
    assert [name for name, _ in arrivals] == [name for name, _ in tensors]
    return received, arrivals.num_bytes


def test_an_original_counts_as_all_that_lies_in_it() -> None:
    tensors, originals = stacks(make(Served())[1])
    received, num_bytes = arrive(list(tensors.items()), originals)
    assert received == {"q", "k", "v", *(name for name, _ in originals["stack"].parts)}
    assert num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    del tensors["stack"]
    assert arrive(list(tensors.items()), originals)[0] == {"q", "k", "v"}, "the commit then misses the experts by name"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda tensors: [*tensors, tensors[0]], "q arrived twice"),
        (lambda tensors: [*tensors, ("other", tensors[0][1])], "other arrived but is not in the manifest of version 7"),
        (
            lambda tensors: [("q", tensors[0][1][:2])],
            r"q arrived as float32 \(2, 6\), its manifest says",
        ),
        (lambda tensors: [("q", tensors[0][1].bfloat16())], "q arrived as bfloat16"),
    ],
)
def test_an_original_that_is_not_as_announced_is_refused(fault: Any, says: str) -> None:
    tensors, originals = stacks(make(Served())[1])
    with pytest.raises(RefitRefused, match=says):
        arrive(fault(list(tensors.items())), originals)
