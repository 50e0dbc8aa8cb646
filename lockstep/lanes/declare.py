"""What a test asks for, as records: the mark on it, and one case for each hardware that the mark names.

    @pytest.mark.lane(
        "stage-c-4-gpu",
        hardware={"cuda": "h200", "rocm": "mi350"},
        minutes=15,
        labels=["megatron", "replay"],
        owner="refit",
        disabled={"rocm": Disabled(reason="all-to-all hangs", issue="https://…/12", expires="2027-01-31")},
        extra_env={"rocm": {"ALL_TO_ALL": "rccl"}},
    )
    def test_replay(lane_case, lane_evidence): ...

One body for every vendor: what differs is data of the case, keyed by vendor, by hardware, or by ``"*"`` for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any

CPU = "cpu"
"""Vendor and hardware of a case that needs no accelerator."""

EVERYWHERE = "*"


@dataclass(frozen=True, slots=True)
class Disabled:
    """Why a case is off, where that is followed up, and the ISO date from which the plan fails because of it."""

    reason: str
    issue: str
    expires: str

    def expired(self, today: date) -> bool:
        """Whether the last day on which it may be off has passed."""
        return date.fromisoformat(self.expires) < today


@dataclass(frozen=True, slots=True)
class Declaration:
    """A mark as written. ``minutes`` is the estimate for all parameters of the test together, on one machine.

    ``hardware``: models by vendor. ``disabled``: by vendor or model. ``gates``: names that each run must record.
    ``run``: ``num_steps``, ``step_s`` and ``checked_at_step`` of a training run, which are checked against the time.
    """

    lane: str
    hardware: Mapping[str, tuple[str, ...]]
    minutes: float
    owner: str
    labels: tuple[str, ...] = ()
    disabled: Mapping[str, Disabled] = field(default_factory=dict)
    recipe: str | None = None
    overlay: Mapping[str, str] = field(default_factory=dict)
    layout: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    extra_args: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    extra_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    gates: tuple[str, ...] = ()
    run: Mapping[str, float] = field(default_factory=dict)
    retries: int | None = None


@dataclass(frozen=True, slots=True)
class FoundTest:
    """A test in a file. ``name``: ``test_a`` or ``TestB::test_a``. ``line``: of the mark, else of the definition.

    ``never_collected``: why pytest will not collect it (its name, its class, no parameters), else None.
    """

    path: str
    name: str
    line: int
    declaration: Declaration | None = None
    never_collected: str | None = None

    @property
    def test_id(self) -> str:
        """``tests/test_x.py::TestB::test_a``: the node id without parameters."""
        return f"{self.path}::{self.name}"

    @property
    def where(self) -> str:
        """``tests/test_x.py:12``."""
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True)
class Case:
    """One test on one hardware: what the plan places, the plugin runs and the evidence names.

    ``declared`` is false for a test without a mark, which belongs to the catalogue's default lane. ``overlay`` names
    the recipe's overlay; ``layout``, ``extra_args`` and ``extra_env`` are those of this hardware.
    """

    test_id: str
    where: str
    lane: str
    stage: str
    vendor: str
    hardware: str
    num_gpus: int
    minutes: float
    declared: bool = True
    labels: tuple[str, ...] = ()
    owner: str = ""
    disabled: Disabled | None = None
    recipe: str | None = None
    overlay: str | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)
    gates: tuple[str, ...] = ()
    run: Mapping[str, float] = field(default_factory=dict)
    retries: int = 0

    @property
    def path(self) -> str:
        """The test file."""
        return self.test_id.partition("::")[0]


def make_case(
    test: FoundTest, declaration: Declaration, vendor: str, hardware: str, *, stage: str, num_gpus: int, retries: int
) -> Case:
    """The case of a declared test on one hardware, with what its data say for that hardware."""
    layers = (EVERYWHERE, vendor, hardware) if vendor != hardware else (EVERYWHERE, vendor)
    overlays = [declaration.overlay[key] for key in layers if key in declaration.overlay]
    off = [declaration.disabled[key] for key in layers if key in declaration.disabled]
    return Case(
        test_id=test.test_id,
        where=test.where,
        lane=declaration.lane,
        stage=stage,
        vendor=vendor,
        hardware=hardware,
        num_gpus=num_gpus,
        minutes=declaration.minutes,
        labels=declaration.labels,
        owner=declaration.owner,
        disabled=off[-1] if off else None,
        recipe=declaration.recipe,
        overlay=overlays[-1] if overlays else None,
        layout={name: value for key in layers for name, value in declaration.layout.get(key, {}).items()},
        extra_args=tuple(argument for key in layers for argument in declaration.extra_args.get(key, ())),
        extra_env={name: value for key in layers for name, value in declaration.extra_env.get(key, {}).items()},
        gates=declaration.gates,
        run=declaration.run,
        retries=retries if declaration.retries is None else declaration.retries,
    )
