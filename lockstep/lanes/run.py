"""A run of pytest on a lane: which items run, in which environment, how often, and what is written about it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import pytest
from _pytest.runner import runtestprotocol  # what every plugin that repeats a test uses

from lockstep.lanes.catalogue import Lane
from lockstep.lanes.declare import Case
from lockstep.lanes.evidence import Gate, Outcome, Result, Run, write_run
from lockstep.lanes.hygiene import Watch, descendants, environment
from lockstep.lanes.machine import run_tool
from lockstep.lanes.plugin import CASE, RECORDER
from lockstep.lanes.session import Assignment

VERSIONS = ("pytest", "torch", "transformers", "vllm", "sglang", "ray", "triton", "flash-attn", "aiter", "numpy")
RETRIED = "rerun"
"""Outcome of a report that a retry follows: neither passed nor failed, printed as RETRY, kept by JUnit files."""


@dataclass
class _Seen:
    """What the items of one test gave so far."""

    case: Case
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    retries: int = 0
    timeout_s: float | None = None
    gates: list[Gate] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    why: str = ""

    def result(self) -> Result:
        failed, passed = "failed" in self.outcomes, "passed" in self.outcomes
        outcome: Outcome = "failed" if failed else "passed" if passed else "skipped"
        return Result(
            test_id=self.case.test_id, outcome=outcome, minutes=round(self.seconds / 60, 4),
            num_items=len(self.outcomes), num_retries=self.retries, timeout_s=self.timeout_s, recipe=self.case.recipe,
            overlay=self.case.overlay, gates=tuple(self.gates), left=tuple(self.left), why=self.why,
        )  # fmt: skip


class LaneRun:
    """The hooks of one run. Registered by ``plugin.pytest_configure`` when ``--lane`` is given."""

    def __init__(self, config: pytest.Config, assignment: Assignment) -> None:
        self.config = config
        self.assignment = assignment
        catalogue = assignment.project.catalogue
        self.lane: Lane = catalogue.lanes[assignment.lane]
        self.watch = Watch(
            vendor=assignment.machine.vendor,
            env_allowed=catalogue.env_allowed,
            processes_allowed=catalogue.processes_allowed,
            slack_mib=catalogue.gpu_memory_slack_mib,
        )
        self.seen: dict[str, _Seen] = {}
        self.broken: dict[str, str] = {}
        self.started = datetime.now(UTC)
        self.clock = time.monotonic()
        self.evidence: str | None = None
        self.note = ""
        self.whole = config.args_source is not pytest.Config.ArgsSource.ARGS
        if self.whole:  # paths given by hand narrow a run; else the lane says what is collected, not pytest's testpaths
            config.args[:] = [str(assignment.project.root / name) for name in assignment.files]

    def pytest_report_header(self) -> str:
        """Which machine this really is."""
        machine = self.assignment.machine
        devices = ", ".join(machine.devices) or "no GPU"
        return (
            f"lane: {self.assignment.lane} on {self.assignment.hardware}, shard {self.assignment.shard}; "
            f"this machine: {devices} ({machine.source})"
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the shard; a registered test without an item is an error, as is a mark that the source does not show."""
        kept: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        problems: list[str] = []
        declared = self.assignment.declared
        for item in items:
            test_id = item.nodeid.partition("[")[0]
            case = self._case(item, test_id, declared, problems)
            (dropped if case is None else kept).append(item)
            if case is not None:
                item.stash[CASE] = case
                self._limit_time(item, case)
        collected = {item.stash[CASE].test_id for item in kept}
        files = {item.nodeid.partition("::")[0] for item in items}
        for test_id, case in self.assignment.cases.items():
            if test_id not in collected and (self.whole or case.path in files):
                problems.append(f"{case.where}: {test_id} is registered and pytest collected nothing of it")
        if problems:
            raise pytest.UsageError("\n".join(problems))
        items[:] = kept
        self.config.hook.pytest_deselected(items=dropped)

    def _case(self, item: pytest.Item, test_id: str, declared: frozenset[str], problems: list[str]) -> Case | None:
        if item.get_closest_marker("lane") is not None and test_id not in declared:
            problems.append(f"{test_id} has a lane mark that its source does not show; write it out on the test itself")
        if test_id in self.assignment.cases:
            return self.assignment.cases[test_id]
        if test_id in self.assignment.elsewhere:
            return None
        if not self.assignment.takes_unplanned(test_id):
            return None
        catalogue = self.assignment.project.catalogue
        return Case(
            test_id=test_id, where=test_id.partition("::")[0], lane=self.assignment.lane, stage=self.lane.stage,
            vendor="cpu", hardware="cpu", num_gpus=0, minutes=catalogue.default_minutes, declared=False,
            retries=self.lane.retries,
        )  # fmt: skip

    def _limit_time(self, item: pytest.Item, case: Case) -> None:
        """A timeout from the estimate, unless the test has one; tests without an estimate keep the project's."""
        own = item.get_closest_marker("timeout")
        if case.declared and own is None:
            seconds = max(case.minutes * 60 * self.lane.timeout_factor, self.lane.min_timeout_s)
            item.add_marker(pytest.mark.timeout(seconds))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, Any, Any]:
        """Remember how things are before the first test."""
        self.watch.start()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """What a fixture wider than a test changes is its own until it ends."""
        if fixturedef.scope == "function":
            return (yield)
        variables, pids = environment(), set(descendants())
        try:
            return (yield)
        finally:
            self.watch.fixture_was_set_up(fixturedef, variables, pids)

    def pytest_fixture_post_finalizer(self, fixturedef: Any) -> None:
        """A fixture has ended."""
        self.watch.fixture_ended(fixturedef)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run a test; on failure again as often as allowed, and say so each time."""
        case = item.stash[CASE]
        seen = self.seen.setdefault(case.test_id, _Seen(case))
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for attempt in range(case.retries + 1):
            if attempt:
                _start_timer_again(item)
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
            again = attempt < case.retries and any(report.failed for report in reports)
            for report in reports:
                if again and report.failed:
                    report.outcome = RETRIED  # type: ignore[assignment]
                item.ihook.pytest_runtest_logreport(report=report)
            if not again:
                self._keep(seen, item, reports)
                break
            seen.retries += 1
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember each failure by item: those of subtests are reported here alone, while their test passes."""
        if report.failed:
            self.broken.setdefault(report.nodeid, f"{report.when}: {_last_line(report)}")

    def _keep(self, seen: _Seen, item: pytest.Item, reports: list[pytest.TestReport]) -> None:
        bad = self.broken.get(item.nodeid)
        skipped = [report for report in reports if report.skipped]  # an expected failure has shown nothing either
        seen.outcomes.append("failed" if bad else "skipped" if skipped else "passed")
        seen.seconds += sum(report.duration for report in reports)
        mark = item.get_closest_marker("timeout")
        seen.timeout_s = float(mark.args[0]) if mark and mark.args else None
        recorder = item.stash.get(RECORDER, None)
        seen.gates += recorder.gates if recorder else []
        reasons = [bad] if bad else [f"{report.when}: {_last_line(report)}" for report in skipped]
        seen.why = seen.why or next(iter(reasons), "")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """The case's variables hold from before its fixtures until after them."""
        os.environ.update(item.stash[CASE].extra_env)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Look for what the test left, put it right, and fail the test that left it."""
        failed = True
        try:
            result = yield
            failed = False
        finally:
            case = item.stash[CASE]
            _withdraw(case, self.watch.expected)
            left = self.watch.after_test()
            self.seen[case.test_id].left += left
            if left and not failed:
                pytest.fail(f"{case.test_id} left behind: {'; '.join(left)}", pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Generator[None, Any, pytest.TestReport]:
        """A test that shows nothing is no success: skipped, expected to fail, without its gates, or with a broken one.

        Skips and expected failures of tests without a mark are left as they are: nobody planned for these.
        """
        report: pytest.TestReport = yield
        case = item.stash[CASE]
        why = ""
        if report.skipped and case.declared:
            did = "failed as its xfail expects" if hasattr(report, "wasxfail") else "skipped itself"
            why = f"{did} on {case.hardware} ({_last_line(report)}): nothing was shown; use disabled=, which has a date"
        elif report.when == "call" and report.passed:
            recorder = item.stash.get(RECORDER, None)
            gates = recorder.gates if recorder else []
            missing = set(case.gates) - {gate.name for gate in gates}
            broken = [gate.text() for gate in gates if not gate.passed]
            if missing:
                why = f"passed without recording its gates {', '.join(sorted(missing))}"
            elif broken:
                why = f"passed although its gates did not: {', '.join(broken)}"
        if why:
            report.outcome = "failed"
            report.longrepr = f"{case.test_id} {why}"
            vars(report).pop("wasxfail", None)
        return report

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
        """Print a retry as one."""
        return ("retried", "R", ("RETRY", {"yellow": True})) if report.outcome == RETRIED else None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the evidence; a run in which nothing ran is no success."""
        results = tuple(one.result() for one in self.seen.values())
        if self.config.getoption("collectonly"):
            return
        if exitstatus == 0 and not any(result.outcome == "passed" for result in results):
            self.note = "not tested: no test ran"
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        machine, catalogue = self.assignment.machine, self.assignment.project.catalogue
        run = Run(
            lane=self.assignment.lane, stage=self.lane.stage, hardware=self.assignment.hardware, vendor=machine.vendor,
            devices=machine.devices, source=machine.source, shard=self.assignment.shard,
            commit=self.assignment.commit, started=self.started.isoformat(timespec="seconds"),
            minutes=round((time.monotonic() - self.clock) / 60, 3), exit_status=int(session.exitstatus),
            command=tuple(str(one) for one in self.config.invocation_params.args), versions=versions(machine.vendor),
            tests=results,
        )  # fmt: skip
        folder = self.config.getoption("--lanes-evidence") or self.assignment.project.root / catalogue.evidence
        self.evidence = str(write_run(run, folder))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Where the evidence is, and what was retried or left behind."""
        if self.evidence is None:
            return
        terminalreporter.section("lane")
        if self.note:
            terminalreporter.line(self.note)
        for one in self.seen.values():
            if one.retries:
                terminalreporter.line(f"retried {one.retries} times: {one.case.test_id}")
            for left in one.left:
                terminalreporter.line(f"left behind by {one.case.test_id}: {left}")
        terminalreporter.line(f"evidence: {self.evidence}")


def versions(vendor: str) -> dict[str, str]:
    """Versions that a result may depend on: Python, the installed packages of interest, the driver."""
    found = {"python": sys.version.split()[0]}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    commands = {
        "cuda": ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "rocm": ("rocm-smi", "--showdriverversion"),
    }
    if vendor in commands:
        lines = [line for line in (run_tool(commands[vendor]) or "").splitlines() if any(c.isdigit() for c in line)]
        found["driver"] = lines[0].rpartition(":")[2].strip() if lines else "unknown"
    return found


def _start_timer_again(item: pytest.Item) -> None:
    """Give a retry its own time: pytest-timeout sets its timer once for a test, and one that has fired is gone."""
    from pytest_timeout import _get_item_settings  # pyright: ignore[reportPrivateUsage]

    hooks = item.config.pluginmanager.hook
    settings = _get_item_settings(item)
    if settings.timeout and settings.timeout > 0 and not settings.func_only:
        hooks.pytest_timeout_cancel_timer(item=item)
        hooks.pytest_timeout_set_timer(item=item, settings=settings)


def _withdraw(case: Case, expected: dict[str, str]) -> None:
    """Take the case's own variables out again, so that only what the test did beside them is compared."""
    for name in case.extra_env:
        if name in expected:
            os.environ[name] = expected[name]
        else:
            os.environ.pop(name, None)


def _last_line(report: pytest.TestReport) -> str:
    """Why a test failed or skipped, in a line: the exception's own words where there are some."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else str(crash.message)
    lines = [line for line in text.splitlines() if line.strip()]
    return (lines[-1] if crash is None else lines[0])[:300] if lines else ""
