"""The dry load: a loader is asked where tensors would go, and no value is read or written. No vLLM is needed for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from lockstep.records import TensorSpec
from lockstep.rollout.vllm_coverage import DryLoad, Write, dry_load, num_covered, numel
from lockstep.rollout.vllm_plan import _uncovered

Tensors = Iterable[tuple[str, torch.Tensor]]
SHAPES = {
    "q.weight": (6, 4),
    "k.weight": (2, 4),
    "experts.0.up": (3, 4),
    "experts.1.up": (3, 4),
    "turned": (4, 5),
    "head": (7, 4),
}


def targets() -> dict[str, torch.Tensor]:
    shapes = {"qk": (8, 4), "up": (2, 3, 4), "turned": (5, 4), "head": (8, 4)}
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def parameter_loader(parameter: torch.Tensor, loaded: torch.Tensor, *, start: int = 0) -> None:
    parameter.data.narrow(0, start, loaded.shape[0]).copy_(loaded)


def loader(parameters: dict[str, torch.Tensor]) -> Callable[[Tensors], None]:
    """A model's loader: fuses q and k, stacks experts, turns one, pads another, ignores what it doesn't know."""

    def load_weights(tensors: Tensors) -> None:
        for name, tensor in tensors:
            if name in ("q.weight", "k.weight"):
                fused: Any = parameters["qk"]
                fused.weight_loader(fused, tensor, start=6 if name[0] == "k" else 0)
            elif name.startswith("experts."):
                expert = int(name.split(".")[1])
                stack: Any = parameters["up"]
                if expert < 2:
                    stack.data[expert].copy_(tensor)
            elif name == "turned":
                parameters["turned"].copy_(tensor.permute(1, 0).contiguous())
            elif name == "head":
                head: Any = parameters["head"]
                head.data[:7].copy_(tensor)
                head.data[7:].fill_(0)

    return load_weights


def ask(
    shapes: dict[str, tuple[int, ...]], load: Callable[[dict[str, torch.Tensor]], Callable[[Tensors], Any]] = loader
) -> DryLoad:
    parameters = targets()
    tensors = {name: (shape, torch.float32) for name, shape in shapes.items()}
    return dry_load(
        load(parameters), parameters, lambda twin: getattr(twin, "weight_loader", parameter_loader), tensors
    )


def test_every_write_is_seen_with_its_place_and_the_part_it_came_from() -> None:
    dry = ask(SHAPES)
    assert dry.problems == []
    assert dry.refused == {}
    whole = ((2, 4), (4, 1), 0)
    assert dry.writes["k.weight"] == [Write("qk", ((2, 4), (4, 1), 24), whole, through_loader=True)]
    assert dry.writes["experts.1.up"] == [
        Write("up", ((3, 4), (4, 1), 12), ((3, 4), (4, 1), 0), through_loader=False),
    ]
    assert dry.writes["turned"][0].source is None, "a transposed copy is no part of what was sent"
    assert {name: sum(numel(write.region) for write in dry.writes[name]) for name in SHAPES} == {
        "q.weight": 24,
        "k.weight": 8,
        "experts.0.up": 12,
        "experts.1.up": 12,
        "turned": 20,
        "head": 28,
    }
    assert dry.padding["head"] == {((1, 4), (4, 1), 28)}


def test_names_that_the_loader_ignores_are_written_nowhere() -> None:
    dry = ask({**SHAPES, "experts.gate_up_proj": (2, 6, 4), "experts.5.up": (3, 4)} | {"who": (1,)})
    assert "who" not in dry.writes
    assert "who" not in dry.offered
    assert "experts.5.up" not in dry.writes


def test_a_loader_that_raises_is_asked_again_without_that_tensor() -> None:
    dry = ask({**SHAPES, "q.weight": (9, 4), "turned": (5,)})
    assert dry.refused.keys() == {"q.weight", "turned"}
    assert dry.complete
    assert dry.writes.keys() == SHAPES.keys() - {"q.weight", "turned"}


@pytest.mark.parametrize("shape", [(1, 1), (9, 9), (4, 3)])
def test_a_value_of_another_shape_is_a_problem_even_if_it_could_be_spread(shape: tuple[int, ...]) -> None:
    dry = ask({**SHAPES, "experts.1.up": shape})
    assert dry.problems == [f"shape: experts.1.up: {shape} does not fit into (3, 4) of up"]


def test_a_loader_that_always_raises_ends() -> None:
    def broken(_: dict[str, torch.Tensor]) -> Callable[[Tensors], None]:
        def load_weights(tensors: Tensors) -> None:
            list(tensors)
            raise KeyError("everything")

        return load_weights

    dry = ask(SHAPES, broken)
    assert not dry.complete
    assert dry.refused


def test_live_tensors_that_are_no_parameters_stay_as_they_are() -> None:
    outside = torch.ones(3, 4)

    def load(parameters: dict[str, torch.Tensor]) -> Callable[[Tensors], None]:
        def load_weights(tensors: Tensors) -> None:
            for _, tensor in tensors:
                outside.copy_(tensor)
                scratch = torch.empty(3, 4, device="meta")
                scratch.copy_(tensor)
                parameters["up"].data[0].copy_(scratch)

        return load_weights

    dry = ask({"experts.0.up": (3, 4)}, load)
    assert torch.equal(outside, torch.ones(3, 4))
    assert dry.problems == ["experts.0.up: the loader writes into a tensor that is no parameter"]


@pytest.mark.parametrize("geometry", [((2, 3), (3, 1), 0), ((), (), 5), ((4, 0), (1, 1), 0)])
def test_numel_is_the_product_of_sizes(geometry: Any) -> None:
    expected = {(2, 3): 6, (): 1, (4, 0): 0}[geometry[0]]
    assert numel(geometry) == expected


def composed(parameters: dict[str, torch.Tensor]) -> Callable[[Tensors], None]:
    """vLLM's ``composed_weight_loader``: a copy, then a function of what was copied. And a scale in place."""

    def load_weights(tensors: Tensors) -> None:
        for name, tensor in tensors:
            parameter = parameters["turned" if name == "turned" else "up"]
            parameter.data.copy_(tensor)
            if name == "turned":
                parameter.data.copy_(-torch.exp(parameter.float()))
            else:
                parameter.data.mul_(0.5)

    return load_weights


def test_what_a_loader_computes_of_its_own_writes_is_no_part_of_what_was_sent() -> None:
    dry = ask({"turned": (5, 4), "up": (2, 3, 4)}, composed)
    assert dry.problems == []
    assert not any(dry.padding.values()), "a function of the weight is no constant beside it"
    for name in ("turned", "up"):
        (write,) = dry.writes[name]
        assert write.source is None
        assert numel(write.region) == {"turned": 20, "up": 24}[name]


def test_a_constant_that_is_written_over_counts_once() -> None:
    def load(parameters: dict[str, torch.Tensor]) -> Callable[[Tensors], None]:
        def load_weights(tensors: Tensors) -> None:
            for _, tensor in tensors:
                parameters["head"].data.zero_()
                parameters["head"].data[:7].copy_(tensor)

        return load_weights

    dry = ask({"head": (7, 4)}, load)
    head = targets()["head"]
    named = [write.region for write in dry.writes["head"]]
    assert num_covered(head, named) == 28
    assert num_covered(head, [*named, *dry.padding["head"]]) == 32 == head.numel()


def problems_of(
    load: Callable[[dict[str, torch.Tensor]], Callable[[Tensors], Any]], shapes: dict[str, Any]
) -> list[str]:
    """What the plan says about ``head`` alone."""
    dry = ask(shapes, load)
    head = {"head": targets()["head"]}
    specs = {name: TensorSpec(name, shape, "float32", name) for name, shape in shapes.items()}
    return _uncovered(torch.nn.Module(), specs, head, dry)


def test_a_constant_under_or_beside_a_weight_is_neither_doubled_nor_a_weight() -> None:
    def clearing(rows: int) -> Callable[[dict[str, torch.Tensor]], Callable[[Tensors], None]]:
        def load(parameters: dict[str, torch.Tensor]) -> Callable[[Tensors], None]:
            def load_weights(tensors: Tensors) -> None:
                for _, tensor in tensors:
                    parameters["head"].data.zero_()
                    parameters["head"].data[:rows].copy_(tensor[:rows])

            return load_weights

        return load

    assert problems_of(clearing(7), {"head": (7, 4)}) == []
    (missing,) = problems_of(clearing(0), {"head": (7, 4)})
    assert missing.startswith("missing: 0 of 32 values of the live head")
