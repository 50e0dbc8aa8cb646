"""Rank grids and the rules about them, against a brute-force enumeration that knows nothing of strides."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.topology.grids import dense_grid, expert_grid
from lockstep.topology.layout import check_layout
from lockstep.topology.records import Job, MegatronSwitches, TrainLayout
from lockstep.topology.rules import rule_named
from tests.unit.layout_planted import megatron, shape

Groups = frozenset[frozenset[int]]
GRID_RULES = ("dense-grid", "expert-grid", "pipeline-groups")
ORDERS = ["-".join(order) for order in itertools.permutations(("tp", "cp", "ep", "dp", "pp"))]
SMALL = st.integers(1, 8)


def enumerate_groups(world: int, sizes: dict[str, int], order: str, axis: str) -> Groups | None:
    """Groups of one axis by handing out ranks in nested loops, the first axis of the order innermost; None where the
    loops do not use up exactly the ranks that there are."""
    axes = order.split("-")
    places = list(itertools.product(*(range(sizes[name]) for name in reversed(axes))))
    if len(places) != world:
        return None
    groups: dict[tuple[int, ...], set[int]] = {}
    for rank, place in enumerate(places):
        others = tuple(at for name, at in zip(reversed(axes), place, strict=True) if name != axis)
        groups.setdefault(others, set()).add(rank)
    return frozenset(frozenset(group) for group in groups.values())


def fill(world: int, *sizes: int) -> int | None:
    """The size of the one axis that is free, found by trying; None where none fills the world."""
    product = 1
    for size in sizes:
        product *= size
    return next((free for free in range(1, world + 1) if product * free == world), None)


def brute_force_legal(job: Job) -> bool:
    """Whether Megatron would build both grids with the same pipeline groups."""
    train, world = job.train, job.train_world
    assert train is not None
    assert train.etp is not None
    order = train.switches.rank_order
    dp, edp = fill(world, train.tp, train.pp, train.cp), fill(world, train.etp, train.ep, train.pp)
    if dp is None or edp is None:
        return False
    dense = {"tp": train.tp, "cp": train.cp, "ep": 1, "dp": dp, "pp": train.pp}
    expert = {"tp": train.etp, "cp": 1, "ep": train.ep, "dp": edp, "pp": train.pp}
    if enumerate_groups(world, dense, order, "pp") != enumerate_groups(world, expert, order, "pp"):
        return False
    return order.endswith("pp") or train.pp == 1 or edp == dp  # Megatron asserts this beside the groups


def grid_job(world: int, tp: int, pp: int, cp: int, ep: int, etp: int, order: str) -> Job:
    """A job of which the grids alone are looked at."""
    model = shape("qwen3-30b-a3b", num_experts=840)
    base = megatron(model, gpus=1, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, switches={"rank_order": order})
    return replace(base, nodes=world)


def rules_allow(job: Job) -> bool:
    return all(rule_named(name).broken(job) is None for name in GRID_RULES)


@given(st.integers(1, 64), SMALL, SMALL, SMALL, SMALL, SMALL, st.sampled_from(ORDERS))
@settings(max_examples=400, deadline=None)
def test_the_rules_agree_with_an_enumeration_of_ranks(
    world: int, tp: int, pp: int, cp: int, ep: int, etp: int, order: str
) -> None:
    job = grid_job(world, tp, pp, cp, ep, etp, order)
    assert rules_allow(job) == brute_force_legal(job)


@pytest.mark.parametrize("world", [8, 12, 36, 64])
def test_the_rules_agree_on_every_grid_that_fills_a_world(world: int) -> None:
    """Sizes that divide: here the pipeline groups decide, and they differ in many orders."""
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    outcomes: set[bool] = set()
    orders = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "pp-tp-cp-ep-dp", "cp-tp-pp-ep-dp")
    for tp, pp, etp in itertools.product(sizes[:4], sizes[:4], sizes[:3]):
        for cp, ep, order in itertools.product(sizes[:3], sizes[:4], orders):
            job = grid_job(world, tp, pp, cp, ep, etp, order)
            assert rules_allow(job) == brute_force_legal(job), (job.train, order)
            outcomes.add(rules_allow(job))
    assert outcomes == {True, False}


@given(st.integers(1, 64), SMALL, SMALL, SMALL, SMALL, SMALL, st.sampled_from(ORDERS))
@settings(max_examples=150, deadline=None)
def test_groups_of_every_axis_are_those_of_the_enumeration(
    world: int, tp: int, pp: int, cp: int, ep: int, etp: int, order: str
) -> None:
    layout = TrainLayout(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, switches=MegatronSwitches(rank_order=order))
    for build, product in ((dense_grid, tp * pp * cp), (expert_grid, etp * ep * pp)):
        if world % product:
            with pytest.raises(ValueError, match=f"= {product} does not divide world {world}"):
                build(layout, world)
            continue
        grid = build(layout, world)
        assert grid.world == world
        for axis in ("tp", "cp", "ep", "dp", "pp"):
            expected = enumerate_groups(world, dict(grid.sizes), order, axis)
            assert frozenset(map(frozenset, grid.groups(axis))) == expected


def test_the_groups_of_thirty_two_ranks() -> None:
    """tp 4, pp 4, ep 8, etp 1: an expert group spans both replicas of a stage."""
    layout = TrainLayout(tp=4, pp=4, ep=8, etp=1)
    dense, expert = dense_grid(layout, 32), expert_grid(layout, 32)
    assert dense.groups("tp") == tuple(tuple(range(first, first + 4)) for first in range(0, 32, 4))
    assert dense.groups("dp")[:5] == ((0, 4), (1, 5), (2, 6), (3, 7), (8, 12))
    assert dense.groups("pp")[0] == expert.groups("pp")[0] == (0, 8, 16, 24)
    assert dense.groups("tp", "pp")[0] == (0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
    assert expert.groups("ep") == tuple(tuple(range(first, first + 8)) for first in range(0, 32, 8))
    assert {len(group) for group in (*expert.groups("tp"), *expert.groups("dp"))} == {1}


def test_an_order_may_leave_out_what_has_size_one() -> None:
    switches = MegatronSwitches(rank_order="tp-pp-dp")
    grid = dense_grid(TrainLayout(tp=2, pp=2, switches=switches), 8)
    assert grid.groups("pp")[0] == (0, 2)
    assert grid.order == ("tp", "pp", "dp", "ep", "cp")


def test_context_parallel_ranks_serve_as_expert_ranks() -> None:
    """cp is no axis of the experts' grid: cp 8 leaves room for ep 8 on the same eight ranks."""
    found = [finding.rule for finding in check_layout(megatron(cp=8, ep=8, etp=1))]
    assert "expert-grid" not in found
    assert "dense-grid" not in found
