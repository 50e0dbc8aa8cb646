"""The registry of derived state: what an engine computes from its weights or its layout, and no checkpoint brings.

A refit that moves every byte can still leave an engine computing with something old: an expert map that a dummy start
zeroed, a dequantised copy, a packed head. Each such state is an entry with a rule for rebuilding it. The registry runs

    before_plan   what the loader itself consults (expert maps): its answers about a manifest depend on it
    before_load   what would make a reload skip its work
    after_load    what is computed from the weights, in order
    check         the same rebuilds, compared and thrown away

and after every wake. An entry reports what it *changed*. It writes into the storage that is there, because captured
graphs keep addresses; another shape or a moved address is an error, never a silent replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from lockstep.records import DerivedReport

Phase = Literal["before_plan", "before_load", "after_load"]


class DerivedStateError(RuntimeError):
    """Derived state that can't be rebuilt in place; the text names it."""


class Entry(Protocol):
    """One kind of derived state of one kind of engine. ``engine`` is whatever the receiver drives.

    ``sources``: where its values come from, for people. Entries of one phase run by rising ``order``.
    """

    @property
    def name(self) -> str: ...

    @property
    def phase(self) -> Phase: ...

    @property
    def order(self) -> int: ...

    @property
    def sources(self) -> str: ...

    def refusal(self, engine: Any) -> str | None:
        """Why an engine with this state must not be refitted at all."""
        ...

    def applies(self, engine: Any) -> bool:
        """Whether this engine, build, platform and model has the state, and the entry was shown to be right there."""
        ...

    def refresh(self, engine: Any) -> DerivedReport:
        """Make it right, in place."""
        ...

    def check(self, engine: Any) -> DerivedReport:
        """Compare with a rebuild and change nothing."""
        ...


class Registry:
    """Entries in order; satisfies the receiver's ``DerivedState``. Raises ValueError if two have one name."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries: tuple[Entry, ...] = tuple(sorted(entries, key=lambda entry: (entry.order, entry.name)))
        names = [entry.name for entry in self.entries]
        if len(set(names)) < len(names):
            raise ValueError(f"derived-state entries of one name: {sorted({n for n in names if names.count(n) > 1})}")

    def without(self, *names: str) -> Registry:
        """The registry with some entries switched off, to show what they are for. Raises KeyError for unknown ones."""
        if unknown := set(names) - {entry.name for entry in self.entries}:
            raise KeyError(f"no derived-state entry {sorted(unknown)}; there are {[e.name for e in self.entries]}")
        return Registry(entry for entry in self.entries if entry.name not in names)

    def refusals(self, engine: Any) -> tuple[str, ...]:
        """Why this engine must not be refitted, by entry; empty if it may."""
        found = ((entry.name, entry.refusal(engine)) for entry in self.entries)
        return tuple(f"{name}: {reason}" for name, reason in found if reason)

    def before_plan(self, engine: Any) -> tuple[DerivedReport, ...]:
        """Refresh what the loader consults."""
        return tuple(entry.refresh(engine) for entry in self._of("before_plan", engine))

    def before_load(self, engine: Any) -> tuple[DerivedReport, ...]:
        """Refresh what would make a reload skip its work."""
        return tuple(entry.refresh(engine) for entry in self._of("before_load", engine))

    def after_load(self, engine: Any) -> tuple[DerivedReport, ...]:
        """Refresh what is computed from the weights."""
        return tuple(entry.refresh(engine) for entry in self._of("after_load", engine))

    def check(self, engine: Any) -> tuple[DerivedReport, ...]:
        """Compare everything with a rebuild."""
        return tuple(entry.check(engine) for entry in self.entries if entry.applies(engine))

    def _of(self, phase: Phase, engine: Any) -> Sequence[Entry]:
        return [entry for entry in self.entries if entry.phase == phase and entry.applies(engine)]


@dataclass(frozen=True, slots=True)
class DerivedTensor:
    """A live tensor and what it would be if it were computed now."""

    name: str
    live: torch.Tensor
    rebuilt: torch.Tensor


@dataclass(frozen=True)
class TensorEntry:
    """An entry whose state is tensors: ``states`` yields each with its rebuild.

    Of two states that share storage the first is reported. A rebuild is converted to the live dtype.
    """

    name: str
    phase: Phase
    order: int
    sources: str
    states: Callable[[Any], Iterator[DerivedTensor]]
    applicable: Callable[[Any], bool] = lambda engine: True
    refused: Callable[[Any], str | None] = lambda engine: None
    _addresses: dict[str, int] = field(default_factory=dict)

    def refusal(self, engine: Any) -> str | None:
        """See ``Entry``."""
        return self.refused(engine)

    def applies(self, engine: Any) -> bool:
        """See ``Entry``."""
        return self.applicable(engine)

    def refresh(self, engine: Any) -> DerivedReport:
        """Copy rebuilds over live values that differ. Raises DerivedStateError for another shape or a moved address."""
        return self._run(engine, write=True)

    def check(self, engine: Any) -> DerivedReport:
        """Count live values that differ. Raises as ``refresh``."""
        return self._run(engine, write=False)

    def _run(self, engine: Any, *, write: bool) -> DerivedReport:
        num_states = 0
        changed: list[str] = []
        seen: set[int] = set()
        with torch.no_grad():
            for state in self.states(engine):
                self._same_place(state)
                if state.live.numel() and state.live.data_ptr() in seen:
                    continue
                seen.add(state.live.data_ptr())
                num_states += 1
                rebuilt = state.rebuilt.to(device=state.live.device, dtype=state.live.dtype)
                if not equal_bits(state.live, rebuilt):
                    changed.append(state.name)
                    if write:
                        state.live.copy_(rebuilt)
        return DerivedReport(self.name, num_states, len(changed), named(changed))

    def _same_place(self, state: DerivedTensor) -> None:
        if state.live.shape != state.rebuilt.shape:
            raise DerivedStateError(
                f"{self.name}: {state.name} is {tuple(state.live.shape)} in the engine and "
                f"{tuple(state.rebuilt.shape)} if it is rebuilt; a captured graph would read past it"
            )
        address = self._addresses.setdefault(state.name, state.live.data_ptr())
        if address != state.live.data_ptr():
            raise DerivedStateError(
                f"{self.name}: {state.name} moved from {address:#x} to {state.live.data_ptr():#x}; captured graphs "
                "still read the old place"
            )


@dataclass(frozen=True)
class RefusalEntry:
    """An entry for state that can't be refreshed: engines that have it are refused, with the reason."""

    name: str
    sources: str
    refused: Callable[[Any], str | None]
    phase: Phase = "before_load"
    order: int = 0

    def refusal(self, engine: Any) -> str | None:
        """See ``Entry``."""
        return self.refused(engine)

    def applies(self, engine: Any) -> bool:
        """Never: there is nothing to refresh."""
        return False

    def refresh(self, engine: Any) -> DerivedReport:
        """Nothing."""
        return DerivedReport(self.name, 0, 0)

    def check(self, engine: Any) -> DerivedReport:
        """Nothing."""
        return DerivedReport(self.name, 0, 0)


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bytes: NaN equals itself, −0 differs from 0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


def named(names: Sequence[str], limit: int = 3) -> str:
    """A few names for a report's detail; empty for none."""
    if not names:
        return ""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"({', '.join(names[:limit])}{more})"
