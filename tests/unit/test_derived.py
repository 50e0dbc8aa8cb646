"""The registry of derived state: it repairs in place, reports what it changed, and refuses what it can't repair.

Small modules stand for engines: each keeps something that it computed from its weights. Every case shows the fault
without its entry first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.refit.derived import (
    DerivedStateError,
    DerivedTensor,
    RefusalEntry,
    Registry,
    TensorEntry,
    equal_bits,
    named,
)
from lockstep.refit.derived_vllm import registry


class Dequantised(torch.nn.Module):
    """Multiplies by a bfloat16 copy that it made once of its weight: what ROCm builds do with ``wo_a``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
        self.copy = self.weight.detach().to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.copy.float().T


class Memoised(torch.nn.Module):
    """Looks tokens up through an index of its table, computed once."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.nn.Parameter(torch.arange(8.0))
        self.order = self.scores.detach().argsort()

    def forward(self) -> torch.Tensor:
        return self.scores[self.order]


def copies(model: Dequantised) -> Iterator[DerivedTensor]:
    yield DerivedTensor("copy", model.copy, model.weight.detach().to(torch.bfloat16))


def orders(model: Memoised) -> Iterator[DerivedTensor]:
    yield DerivedTensor("order", model.order, model.scores.detach().argsort())


def entry(states: Any, name: str = "state", order: int = 0, phase: Any = "after_load") -> TensorEntry:
    return TensorEntry(name, phase, order, "the weight", states)


def test_a_stale_dequantised_copy_is_rebuilt_at_its_address() -> None:
    model, x = Dequantised(), torch.eye(8)
    address = model.copy.data_ptr()
    with torch.no_grad():
        model.weight.mul_(2)
    expected = x @ model.weight.detach().to(torch.bfloat16).float().T
    assert not torch.equal(model(x), expected), "without the entry the copy must be stale"
    registry = Registry([entry(copies)])
    (found,) = registry.check(model)
    assert (found.num_states, found.num_changed) == (1, 1)
    assert not torch.equal(model(x), expected), "a check changes nothing"
    (report,) = registry.after_load(model)
    assert (report.num_states, report.num_changed) == (1, 1)
    assert torch.equal(model(x), expected)
    assert model.copy.data_ptr() == address
    assert registry.check(model)[0].num_changed == 0
    assert registry.after_load(model)[0].num_changed == 0, "a copy that changes nothing is no repair"


def test_a_stale_memoised_index_is_rebuilt() -> None:
    model = Memoised()
    with torch.no_grad():
        model.scores.copy_(torch.arange(8.0).flip(0))
    assert not torch.equal(model(), model.scores.detach().sort().values)
    Registry([entry(orders)]).after_load(model)
    assert torch.equal(model(), model.scores.detach().sort().values)


def test_a_copy_that_moved_is_an_error_that_names_both_places() -> None:
    model, registry = Dequantised(), Registry([entry(copies)])
    registry.after_load(model)
    old, model.copy = model.copy, model.copy.clone()
    with pytest.raises(DerivedStateError, match="captured graphs still read the old place") as caught:
        registry.check(model)
    assert f"{old.data_ptr():#x}" in str(caught.value)
    assert f"{model.copy.data_ptr():#x}" in str(caught.value)


def test_a_changed_shape_is_an_error_that_names_both_shapes() -> None:
    model = Dequantised()
    model.weight = torch.nn.Parameter(torch.zeros(3, 8))
    with pytest.raises(DerivedStateError, match=r"copy is \(4, 8\) in the engine and \(3, 8\) if it is rebuilt"):
        Registry([entry(copies)]).after_load(model)


def test_shared_storage_counts_once_and_repairs_are_counted_over_all() -> None:
    tables = [torch.zeros(3, dtype=torch.int32) for _ in range(5)]

    def states(_: Any) -> Iterator[DerivedTensor]:
        for index, table in enumerate([*tables, tables[0]]):
            yield DerivedTensor(f"map{index}", table, torch.arange(3) if index % 2 else torch.zeros(3))

    (report,) = Registry([entry(states)]).after_load(None)
    assert (report.num_states, report.num_changed) == (5, 2)
    assert report.detail == "(map1, map3)"
    assert tables[1].tolist() == [0, 1, 2]


def test_entries_run_by_phase_and_order_and_refuse_by_name() -> None:
    ran: list[str] = []

    def noting(name: str) -> Any:
        def states(_: Any) -> Iterator[DerivedTensor]:
            ran.append(name)
            return iter(())

        return states

    ordered = Registry(
        [
            entry(noting("late"), "late", 9),
            entry(noting("early"), "early", 1),
            entry(noting("map"), "map", 5, "before_plan"),
            entry(noting("kernel"), "kernel", 0, "before_load"),
            RefusalEntry("backend", "weights", lambda engine: "not this one"),
            RefusalEntry("other", "weights", lambda engine: None),
        ]
    )
    ordered.before_plan(None)
    ordered.before_load(None)
    ordered.after_load(None)
    assert ran == ["map", "kernel", "early", "late"]
    assert ordered.refusals(None) == ("backend: not this one",)
    assert ordered.without("backend", "late").refusals(None) == ()
    with pytest.raises(KeyError, match="no derived-state entry"):
        ordered.without("lat")
    with pytest.raises(ValueError, match="of one name"):
        Registry([entry(copies), entry(copies)])


class PostProcessed(torch.nn.Linear):
    """A model with a step of its own after loading."""

    def process_weights_after_loading(self) -> None:
        """Whatever it derives."""


def test_a_model_that_derives_as_a_whole_is_refused_by_name() -> None:
    (refusal,) = registry().refusals(PostProcessed(2, 2))
    assert refusal.startswith("model_post_load: PostProcessed post-processes its weights as a whole after loading")
    assert registry().without("model_post_load").refusals(PostProcessed(2, 2)) == ()
    assert registry().refusals(torch.nn.Linear(2, 2)) == ()


def test_the_documented_table_is_the_registry() -> None:
    """Name and phase of each entry, in either direction."""
    page = (Path(__file__).parents[2] / "docs" / "refit.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(\w+)` \| (before_plan|before_load|after_load|refuses) \|", page, re.MULTILINE)
    entries = registry().entries
    phases = {entry.name: "refuses" if isinstance(entry, RefusalEntry) else entry.phase for entry in entries}
    assert dict(table) == phases
    assert len(table) == len(entries)


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_equal_bits_tells_zeros_apart_and_nan_equals_itself(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    assert equal_bits(tensor, tensor.clone())
    flipped = tensor.clone()
    flipped.view(torch.int32)[0] ^= -(2**31)
    assert not equal_bits(tensor, flipped), "the sign of a zero counts"
    assert not equal_bits(tensor, tensor.double())
    assert not equal_bits(tensor, torch.cat([tensor, tensor]))


def test_details_name_a_few_and_count_the_rest() -> None:
    assert named([]) == ""
    assert named(["a"]) == "(a)"
    assert named(["a", "b", "c", "d", "e"]) == "(a, b, c and 2 more)"
