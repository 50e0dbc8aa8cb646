"""What a project has: lanes in their stages, hardware, images, runners, labels. Data in ``lanes.toml`` at its root.

    test_paths = ["tests"]            # where tests are
    packages = ["mine"]               # whose imports are followed from changed files to tests
    default_lane = "stage-a-cpu"      # of tests without a mark …
    default_minutes = 0.05            # … and their estimate
    stages = ["cpu", "one-gpu", "nightly"]
    [lanes.stage-a-cpu]               # stage, num_gpus, target_minutes (of a shard), limit_minutes (of a job), …
    [hardware.h200]                   # vendor, family, device_names (patterns of the whole name)
    [images.cuda]                     # family, dockerfile, reference
    [runners.h200-1]                  # hardware, num_gpus, labels (all of them), image
    [labels.run-amd]                  # vendors or hardware that it picks; none: it picks tests that carry it
    [[changes]]                       # files (patterns) whose change selects tests (patterns) besides imports

``[tool.lockstep.lanes]`` in ``pyproject.toml`` holds the same table where there is no ``lanes.toml``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from lockstep.lanes.declare import CPU
from lockstep.lanes.errors import LanesError

FILE = "lanes.toml"
NIGHTLY = "nightly"
"""A stage of this name is planned only when it is asked for."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Tests that need the same kind of machine. Times in minutes: a shard's aim, a job's limit.

    A test's timeout is its estimate times ``timeout_factor``, at least ``min_timeout_s`` seconds. ``setup`` is a shell
    command that a workflow runs before, on the machine; ``python`` the interpreter that then runs pytest.
    """

    stage: str
    num_gpus: int = 0
    target_minutes: float = 30.0
    limit_minutes: float = 90.0
    max_shards: int = 8
    retries: int = 0
    timeout_factor: float = 3.0
    min_timeout_s: float = 60.0
    setup: str = "true"
    python: str = "python3"


@dataclass(frozen=True, slots=True)
class Hardware:
    """A model of accelerator. ``device_names``: patterns (``*``) of the whole name that the driver's tool prints.

    ``family``: what one image can serve, such as ``sm90`` or ``gfx942``.
    """

    vendor: str
    family: str
    device_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Image:
    """A container image for one family of GPUs, and the file that builds it."""

    family: str
    dockerfile: str
    reference: str


@dataclass(frozen=True, slots=True)
class Runner:
    """Machines of one kind. ``labels``: every label that such a machine has, which is what a job asks for."""

    hardware: str
    labels: tuple[str, ...]
    num_gpus: int = 0
    image: str | None = None


@dataclass(frozen=True, slots=True)
class Label:
    """What a label on a pull request does: picks vendors, hardware or stages; with none, tests that carry it."""

    help: str = ""
    vendors: tuple[str, ...] = ()
    hardware: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()

    @property
    def picks_tests(self) -> bool:
        """Whether it is a suite: it selects the tests that carry it."""
        return not (self.vendors or self.hardware or self.stages)


@dataclass(frozen=True, slots=True)
class Change:
    """Tests (patterns of test ids or paths) that a change of files (patterns) selects, besides those that import it."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The whole of ``lanes.toml``. Paths are relative to the project's root.

    ``always_run``: patterns of tests that every plan has. ``layout_check``: ``module:function``, called with each case
    at planning, returns what is wrong with its layout. ``recipes``: ``module:function``, returns names of recipes.
    ``env_allowed`` and ``processes_allowed``: patterns of variables and command lines that a test may leave.
    """

    stages: tuple[str, ...]
    lanes: Mapping[str, Lane]
    default_lane: str
    default_minutes: float
    test_paths: tuple[str, ...] = ("tests",)
    packages: tuple[str, ...] = ()
    always_run: tuple[str, ...] = ()
    hardware: Mapping[str, Hardware] = field(default_factory=dict)
    images: Mapping[str, Image] = field(default_factory=dict)
    runners: Mapping[str, Runner] = field(default_factory=dict)
    labels: Mapping[str, Label] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    evidence: str = "lanes/evidence"
    history: str = "lanes/history.json"
    layout_check: str | None = None
    recipes: str | None = None
    env_allowed: tuple[str, ...] = ()
    processes_allowed: tuple[str, ...] = ()
    gpu_memory_slack_mib: float = 1024.0

    def vendor(self, hardware: str) -> str:
        """Vendor of a model; ``cpu`` of ``cpu``."""
        return CPU if hardware == CPU else self.hardware[hardware].vendor

    def runners_for(self, hardware: str, num_gpus: int) -> list[str]:
        """Runners with this very model and at least so many, the smallest first."""
        fit = [name for name, one in self.runners.items() if one.hardware == hardware and one.num_gpus >= num_gpus]
        return sorted(fit, key=lambda name: (self.runners[name].num_gpus, name))


def load_catalogue(root: Path) -> Catalogue:
    """The project's catalogue. Raises ``LanesError`` with everything wrong in it."""
    path = root / FILE
    if path.exists():
        table = _toml(path)
    else:
        pyproject = root / "pyproject.toml"
        outer = _toml(pyproject) if pyproject.exists() else {}
        table = outer.get("tool", {}).get("lockstep", {}).get("lanes")
        if table is None:
            raise LanesError(
                f"{root} has no {FILE} and no [tool.lockstep.lanes] in pyproject.toml (docs/lanes.md has one); "
                "start in the project's root, or name it: --root for lockstep lanes, --rootdir for pytest"
            )
    problems: list[str] = []
    catalogue = _build(Catalogue, table, FILE, problems)
    if catalogue is None:
        raise LanesError(problems)
    problems += check_catalogue(catalogue)
    if problems:
        raise LanesError(problems)
    return catalogue


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LanesError(f"{path} is not TOML: {error}") from None


def _build(kind: type[Any], table: Any, where: str, problems: list[str]) -> Any:
    """A record from a table; None, and ``problems`` longer, if keys are unknown, missing or ill-typed."""
    if not isinstance(table, dict):
        problems.append(f"{where}: expected a table, got {table!r}")
        return None
    before = len(problems)
    hints, known = get_type_hints(kind), {one.name: one for one in fields(kind)}
    problems += [f"{where}: unknown key {key}; known: {', '.join(known)}" for key in table if key not in known]
    for name, one in known.items():
        if name not in table and one.default is MISSING and one.default_factory is MISSING:
            problems.append(f"{where}: {name} is missing")
    values = {
        name: _value(hints[name], value, f"{where}: {name}", problems) for name, value in table.items() if name in known
    }
    return kind(**values) if len(problems) == before else None


def _value(hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Mapping and isinstance(value, dict):
        return {key: _build(arguments[1], one, f"{where}.{key}", problems) for key, one in value.items()}
    if origin is tuple and isinstance(value, list):
        if arguments[0] is str:
            if all(isinstance(one, str) and one for one in value):
                return tuple(value)
        else:
            return tuple(_build(arguments[0], one, f"{where}[{n}]", problems) for n, one in enumerate(value))
    wanted = arguments[0] if origin is UnionType else hint
    if wanted is float and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return float(value)
    if wanted is int and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if wanted is str and isinstance(value, str) and value:
        return value
    names = {float: "a number above 0", int: "a whole number from 0", str: "a text that is not empty"}
    expected = names.get(wanted, "a table" if origin is Mapping else "a list")
    problems.append(f"{where}: expected {expected}, got {value!r}")
    return None


def check_catalogue(catalogue: Catalogue) -> list[str]:
    """What disagrees in a catalogue: references to nothing, images shared by families, labels that match too much."""
    return [*_references(catalogue), *_images(catalogue), *_runner_labels(catalogue)]


def _references(catalogue: Catalogue) -> list[str]:
    problems: list[str] = []

    def must_know(where: str, what: str, name: str, known: Mapping[str, Any] | tuple[str, ...]) -> None:
        if name not in known:
            problems.append(f"{FILE}: {where}: unknown {what} {name}; known: {', '.join(known) or 'none'}")

    must_know("default_lane", "lane", catalogue.default_lane, catalogue.lanes)
    default = catalogue.lanes.get(catalogue.default_lane)
    if default and default.num_gpus:
        problems.append(f"{FILE}: default_lane: {catalogue.default_lane} has GPUs; tests without a mark run on a CPU")
    vendors = ("cpu", *sorted({one.vendor for one in catalogue.hardware.values()}))
    models = ("cpu", *catalogue.hardware)
    for name, lane in catalogue.lanes.items():
        must_know(f"lanes.{name}", "stage", lane.stage, catalogue.stages)
    for name, runner in catalogue.runners.items():
        must_know(f"runners.{name}", "hardware", runner.hardware, models)
        if runner.image is not None:
            must_know(f"runners.{name}", "image", runner.image, catalogue.images)
        if (runner.hardware == CPU) != (runner.num_gpus == 0):
            problems.append(f"{FILE}: runners.{name}: {runner.num_gpus} GPUs of {runner.hardware}")
    for name, label in catalogue.labels.items():
        for vendor in label.vendors:
            must_know(f"labels.{name}", "vendor", vendor, vendors)
        for model in label.hardware:
            must_know(f"labels.{name}", "hardware", model, models)
        for stage in label.stages:
            must_know(f"labels.{name}", "stage", stage, catalogue.stages)
    if CPU in catalogue.hardware:
        problems.append(f"{FILE}: hardware.cpu is built in; leave it out")
    return problems


def _images(catalogue: Catalogue) -> list[str]:
    """Kernels are built for one family: an image of another starts, and fails late or computes something else."""
    problems: list[str] = []
    for name, runner in catalogue.runners.items():
        hardware = catalogue.hardware.get(runner.hardware)
        image = catalogue.images.get(runner.image or "")
        if hardware and not runner.image:
            problems.append(f"{FILE}: runners.{name}: {runner.hardware} needs an image of family {hardware.family}")
        if hardware and image and image.family != hardware.family:
            problems.append(
                f"{FILE}: runners.{name}: image {runner.image} is of family {image.family}, "
                f"{runner.hardware} of {hardware.family}"
            )
    references: dict[str, str] = {}
    for name, image in catalogue.images.items():
        other = references.setdefault(image.reference, image.family)
        if other != image.family:
            problems.append(f"{FILE}: images.{name}: {image.reference} is the image of family {other} too")
    return problems


def _runner_labels(catalogue: Catalogue) -> list[str]:
    """A job goes to any machine that has *all* its labels, so labels that another machine has too may pick that one."""
    problems: list[str] = []
    for name, one in catalogue.runners.items():
        for other_name, other in catalogue.runners.items():
            if name != other_name and set(one.labels) <= set(other.labels):
                problems.append(
                    f"{FILE}: runners.{name}: a job for {list(one.labels)} may land on runners.{other_name} "
                    f"({other.hardware}), which has these labels too; give {name} one of its own"
                )
    return problems
