"""pytest's hook-up of the hardware lanes (docs/lanes.md), which Lockstep's own tests use as any project would."""

from __future__ import annotations

pytest_plugins = ["lockstep.lanes.plugin"]
