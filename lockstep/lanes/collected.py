"""The plugin of the process that ``collect`` starts: which tests pytest found, which files gave none, and why."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lockstep.lanes.collect import VARIABLE


class _Recorder:
    """Keeps what a collection found until it can be written."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.found: set[str] = set()
        self.failed: dict[str, str] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember files that gave an error or skipped themselves."""
        if report.outcome != "passed":
            lines = [line for line in str(report.longrepr).splitlines() if line.strip()]
            self.failed[report.nodeid.partition("::")[0]] = lines[-1] if lines else report.outcome

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Before -k or -m take any away."""
        self.found = {item.nodeid.partition("[")[0] for item in items}

    def pytest_collection_finish(self) -> None:
        """Write it."""
        table: Mapping[str, Any] = {"found": sorted(self.found), "failed": self.failed}
        self.out.write_text(json.dumps(table), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """In the process that collects: register the recorder."""
    out = os.environ.get(VARIABLE)
    if out:
        config.pluginmanager.register(_Recorder(Path(out)), "lockstep-lanes-recorder")
