"""The pytest plugin: ``pytest -p lockstep.lanes.plugin --lane stage-c-4-gpu --hardware h200 --shard 1/3``.

Without ``--lane`` it only knows the mark, offers the fixtures and skips what is declared for GPUs alone, with the
command that runs it. With ``--lane`` (``run.LaneRun``) it runs that lane's shard and writes evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lockstep.lanes.declare import CPU, Case
from lockstep.lanes.errors import LanesError
from lockstep.lanes.recorder import Recorder

CASE = pytest.StashKey[Case]()
RECORDER = pytest.StashKey[Recorder]()

MARK = (
    "lane(lane, hardware, minutes, owner, labels, disabled, recipe, overlay, layout, extra_args, extra_env, gates, "
    "run, retries): where this test runs; literals only (docs/lanes.md)"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of a run on a lane."""
    group = parser.getgroup("lanes", "hardware lanes")
    group.addoption("--lane", metavar="LANE", help="run this lane of lanes.toml, and leave evidence")
    group.addoption("--hardware", metavar="MODEL", help="the accelerator that must be here; default: what is here")
    group.addoption("--shard", metavar="K/N", help="the K-th of N parts, balanced by time; default 1/1")
    group.addoption("--lanes-plan", metavar="FILE", type=Path, help="take the shard from this plan's JSON")
    group.addoption("--lanes-evidence", metavar="DIR", type=Path, help="where evidence goes; default: of lanes.toml")


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark and, with ``--lane``, the run."""
    config.addinivalue_line("markers", MARK)
    lane = config.getoption("--lane")
    if not lane:
        for name in ("--hardware", "--shard", "--lanes-plan", "--lanes-evidence"):
            if config.getoption(name):
                raise pytest.UsageError(f"{name} needs --lane")
        return
    from lockstep.lanes.run import LaneRun
    from lockstep.lanes.session import NothingToRunError, assign

    try:
        assignment = assign(
            config.rootpath,
            lane,
            config.getoption("--hardware"),
            config.getoption("--shard") or "1/1",
            config.getoption("--lanes-plan"),
            check_machine=not config.getoption("collectonly"),
        )
    except NothingToRunError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.NO_TESTS_COLLECTED)
    except LanesError as error:
        raise pytest.UsageError(str(error)) from None
    if config.getoption("numprocesses", default=None):
        raise pytest.UsageError("on a lane tests run one after the other, so that left-overs have one owner: --shard")
    if not config.pluginmanager.hasplugin("timeout"):
        raise pytest.UsageError("a lane ends tests that hang, with pytest-timeout: pip install pytest-timeout")
    config.pluginmanager.register(LaneRun(config, assignment), "lockstep-lane-run")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Outside a lane, tests that are declared for GPUs alone are skipped, with the command that runs them."""
    if config.getoption("--lane"):
        return
    for item in items:
        mark = item.get_closest_marker("lane")
        hardware: Any = mark.kwargs.get("hardware", {}) if mark else {}
        if mark and mark.args and CPU not in hardware:
            models = ", ".join(_models(hardware))
            item.add_marker(pytest.mark.skip(reason=f"for {models}: pytest --lane {mark.args[0]} on such a machine"))


def _models(hardware: Any) -> list[str]:
    """Models that a mark names, also one that the plan refuses: outside a lane a faulty mark stops no other test."""
    values = list(hardware.values()) if isinstance(hardware, Mapping) else [hardware]
    return [str(model) for value in values for model in (value if isinstance(value, list | tuple) else [value])]


@pytest.fixture
def lane_evidence(request: pytest.FixtureRequest) -> Recorder:
    """Record gates: ``lane_evidence.gate("agreement", value, bound)``. Outside a lane they are only asserted."""
    recorder = Recorder()
    request.node.stash[RECORDER] = recorder
    return recorder


@pytest.fixture
def lane_case(request: pytest.FixtureRequest) -> Case:
    """The case that runs: its hardware, recipe, overlay, layout and arguments. Outside a lane: a CPU case."""
    if CASE in request.node.stash:
        return request.node.stash[CASE]
    from lockstep.lanes.plan import read_project

    test_id = request.node.nodeid.partition("[")[0]
    for case in read_project(request.config.rootpath).cases:
        if case.test_id == test_id and case.hardware == CPU:
            return case
    raise pytest.UsageError(f"{test_id} has no CPU case; run it with --lane and --hardware")
