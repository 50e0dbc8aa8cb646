"""Which rank is where: Megatron's two rank grids, the dense one and the experts' one, as groups of ranks.

The leftmost axis of an order varies fastest. Context parallelism is no axis of the experts' grid: its ranks are spent
on expert and expert-data parallelism. The rules use the strides; the groups are for the eye and for tests.

    dense  rank = tp  + t·(cp + c·(dp  + dp_size ·pp))        order tp-cp-ep-dp-pp
    expert rank = etp + x·(ep + e·(edp + edp_size·pp))

Source: Megatron-LM megatron/core/parallel_state.py: RankGenerator, generate_masked_orthogonal_rank_groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.topology.records import TrainLayout

AXES = ("tp", "ep", "dp", "pp", "cp")
"""Axes in the order in which the generator appends those that an order leaves out."""


@dataclass(frozen=True, slots=True)
class RankGrid:
    """Sizes of the axes and the order in which they vary, fastest first. In the experts' grid "tp" is the
    expert-tensor and "dp" the expert-data axis.

    Example: ``RankGrid({"tp": 2, "dp": 2}, ("tp", "dp")).groups("dp") == ((0, 2), (1, 3))``.
    """

    sizes: Mapping[str, int]
    order: tuple[str, ...]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    def stride(self, axis: str) -> int:
        """Distance between neighbours along the axis."""
        return math.prod(self.sizes[name] for name in self.order[: self.order.index(axis)])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank lies along each axis."""
        return {axis: rank // self.stride(axis) % self.sizes[axis] for axis in self.order}

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that differ in the given axes only, in order of their first rank."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            place = self.coordinates(rank)
            groups.setdefault(tuple(place[axis] for axis in self.order if axis not in axes), []).append(rank)
        return tuple(sorted(tuple(group) for group in groups.values()))


def expert_tensor_size(layout: TrainLayout) -> int:
    """Expert-tensor parallel size: Megatron takes tp where none is given."""
    return layout.tp if layout.etp is None else layout.etp


def axis_order(order: str) -> tuple[str, ...]:
    """The order with axes that it leaves out appended, as the generator does for axes of size 1."""
    named = tuple(order.lower().split("-"))
    return named + tuple(axis for axis in AXES if axis not in named)


def dense_grid(layout: TrainLayout, world: int) -> RankGrid:
    """The grid of everything but experts. Raises ``ValueError`` where tp·pp·cp does not divide the world."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "ep": 1}
    return _grid(sizes, layout, world, f"tp {layout.tp} · pp {layout.pp} · cp {layout.cp}")


def expert_grid(layout: TrainLayout, world: int) -> RankGrid:
    """The experts' grid. Raises ``ValueError`` where etp·ep·pp does not divide the world."""
    etp = expert_tensor_size(layout)
    sizes = {"tp": etp, "ep": layout.ep, "pp": layout.pp, "cp": 1}
    return _grid(sizes, layout, world, f"etp {etp} · ep {layout.ep} · pp {layout.pp}")


def _grid(sizes: dict[str, int], layout: TrainLayout, world: int, factors: str) -> RankGrid:
    product = math.prod(sizes.values())
    if world % product:
        raise ValueError(f"{factors} = {product} does not divide world {world}")
    return RankGrid(sizes | {"dp": world // product}, axis_order(layout.switches.rank_order))
