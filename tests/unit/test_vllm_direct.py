"""The short way into live weights: the same bytes at the same addresses, or shut."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.records import Original, TensorSpec
from lockstep.rollout.receiver import RefitRefused
from lockstep.rollout.vllm_coverage import Geometry, Write
from lockstep.rollout.vllm_direct import DirectCopy
from lockstep.rollout.vllm_layout import LiveLayout
from lockstep.rollout.vllm_plan import LoadPlan
from lockstep.rollout.vllm_receiver import VllmReceiver, _Originals

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
    return tuple(view.shape), tuple(view.stride()), int(view.storage_offset())


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
    assert composed is not None
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
    assert composed is not None
    assert len(composed._pieces["stack"]) == 2 * EXPERTS
    composed.copy((tensors | {"stack": turned}).items())
    assert {name: tensor for name, tensor in layout.live() if not torch.equal(tensor, checkpoint[name])} == {}


@pytest.mark.parametrize("turned", [False, True])
def test_a_loader_that_transposes_does_so_whatever_the_tensors_strides_are(turned: bool) -> None:
    """A transposed square has the very strides that such a loader reads by."""
    square = torch.arange(9.0).view(3, 3)
    sent = square.T.contiguous().T if turned else square
    live = torch.empty(3, 3)
    DirectCopy({"w": ((live, ((3, 3), (1, 3), 0)),)}).copy([("w", sent)])
    assert torch.equal(live, square.T)


def cut_stack(random: np.random.Generator) -> tuple[torch.Tensor, dict[str, Any], Original, torch.Tensor, torch.Tensor]:
    """A random stack [E, parts · rows, width] of a trainer; what one of several ranks keeps of it, with its experts and
    their parts in some order, cut along rows or the last dimension, transposed or not, and others' experts left out.

    Returns the stack, where each part goes, what lies where in the stack, the live tensor and what it must become.
    """
    num_experts, parts, ranks = (int(random.integers(1, high)) for high in (6, 4, 3))
    rows, width = ranks * int(random.integers(1, 4)), ranks * int(random.integers(1, 4))
    size, dim, rank = (rows, width), int(random.integers(0, 2)), int(random.integers(0, ranks))
    held = [rows, width]
    held[dim] //= ranks
    experts = random.permutation(num_experts)[: int(random.integers(1, num_experts + 1))]
    places = random.permutation(parts)
    if random.random() < 0.4:  # as most engines: in the stack's own order
        experts, places = np.sort(experts), np.arange(parts)
    stack = torch.from_numpy(random.standard_normal((num_experts, parts * rows, width), dtype=np.float32))
    dtype = (torch.float32, torch.bfloat16)[int(random.integers(0, 2))]
    shape = held[::-1] if (turned := random.random() < 0.3) else held  # by a loader that transposes
    live = torch.full((len(experts) + 1, parts * shape[0], shape[1]), torch.nan, dtype=dtype)  # one more is padding
    wanted = live.clone()
    pieces: dict[str, Any] = {f"{e}.{p}": () for e in range(num_experts) for p in range(parts)}
    for slot, e in enumerate(experts):
        for p, place in enumerate(places):
            part = stack[e, p * rows : (p + 1) * rows]
            cut = part.narrow(dim, rank * held[dim], held[dim])
            view = torch.empty(size).narrow(dim, rank * held[dim], held[dim])
            if turned:
                cut, view = cut.T, view.T
            at = slice(place * shape[0], (place + 1) * shape[0])
            wanted[slot, at] = cut.to(dtype)
            pieces[f"{e}.{p}"] = ((live[slot, at], (tuple(shape), view.stride(), int(view.storage_offset()))),)
    regions = [(name, (size, (width, 1), i * rows * width)) for i, name in enumerate(pieces)]
    random.shuffle(regions)
    spec = TensorSpec("stack", tuple(stack.shape), "float32", "stack")
    return stack, pieces, Original(spec, tuple(regions), frozenset(pieces)), live, wanted


@pytest.mark.parametrize("seed", range(8))
def test_any_stack_arrives_in_any_order_and_cut_as_part_by_part(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_pieces = num_merged = 0
    for _ in range(40):
        stack, pieces, original, live, wanted = cut_stack(random)
        composed = DirectCopy(pieces).composed({"stack": original})
        assert composed is not None
        num_pieces += sum(map(len, pieces.values()))
        num_merged += len(composed._pieces["stack"])
        turned = stack.transpose(1, 2).contiguous().transpose(1, 2) if random.random() < 0.3 else stack
        composed.copy([("stack", turned)])
        assert torch.equal(live.nan_to_num(99.0), wanted.nan_to_num(99.0))
    assert num_merged < num_pieces, "some copies were put together"


def test_experts_that_are_written_through_a_transposed_view_are_copied_apart() -> None:
    live = torch.empty(2, 3, 2)
    pieces = {name: ((live[e].T, whole((2, 3))),) for e, name in enumerate("ab")}
    parts = tuple((name, ((2, 3), (3, 1), 6 * e)) for e, name in enumerate(pieces))
    stack = torch.arange(12.0).view(2, 2, 3)
    original = Original(TensorSpec("s", (2, 2, 3), "float32", "s"), parts, frozenset(pieces))
    composed = DirectCopy(pieces).composed({"s": original})
    assert composed is not None
    composed.copy([("s", stack)])
    assert torch.equal(live, stack.transpose(1, 2))


def test_what_does_not_lie_in_one_piece_is_not_composed() -> None:
    """Halves of a tensor's last dimension: geometries of contiguous tensors say nothing about them."""
    pieces = {name: ((torch.empty(2, 3), whole((2, 3))),) for name in ("left", "right")}
    parts = tuple((name, ((2, 3), (6, 1), 3 * i)) for i, name in enumerate(pieces))
    original = Original(TensorSpec("both", (2, 6), "float32", "both"), parts, frozenset(pieces))
    assert DirectCopy(pieces).composed({"both": original}) is None


def begun(direct: DirectCopy, specs: list[TensorSpec]) -> tuple[Any, list[str]]:
    """A receiver in the middle of a refit, and what it is aborted with."""
    reasons: list[str] = []
    subject: Any = object.__new__(VllmReceiver)
    subject._manifest, subject._specs = SimpleNamespace(version=7), {spec.name: spec for spec in specs}
    subject._direct, subject._composed, subject._received, subject._loading = direct, None, set(), False
    subject._host = SimpleNamespace(refit_aborted=reasons.append)
    return subject, reasons


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (None, ""),
        ({"name": "other"}, r"1\.up lies in stack but is not in the manifest of version 7"),
        ({"shape": (WIDTH, INNER)}, r"1\.up lies in stack as float32 \(4, 6\), its manifest says float32 \(6, 4\)"),
        ({"dtype": "bfloat16"}, r"1\.up lies in stack as float32 \(4, 6\), its manifest says bfloat16"),
    ],
)
def test_originals_of_another_manifest_abort_the_refit(change: dict[str, Any] | None, says: str) -> None:
    layout, checkpoint = make(Served())
    direct = DirectCopy.of(layout)
    assert direct is not None
    tensors, originals = stacks(checkpoint)
    specs = [TensorSpec(name, tuple(tensor.shape), "float32", name) for name, tensor in checkpoint.items()]
    if change is not None:
        specs = [replace(spec, **change) if spec.name == "1.up" else spec for spec in specs]
    receiver, reasons = begun(direct, specs)
    source = Source(list(tensors.items()))
    if change is None:
        assert receiver.receive_originals(source, originals) == sum(tensor.nbytes for tensor in tensors.values())
        assert receiver._received == set(checkpoint)
        assert reasons == []
        return
    with pytest.raises(RefitRefused, match=says):
        receiver.receive_originals(source, originals)
    assert [bool(re.search(says, reason)) for reason in reasons] == [True]
    assert receiver._manifest is None
    assert all(bool(tensor.isnan().all()) for _, tensor in layout.live()), "nothing was written"


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
