"""Hardware lanes: one test, many machines, and nothing green that did not run. A pytest plugin and what plans for it.

``declare`` (records) and ``read`` (from the source, without importing it) say what a test asks for; ``catalogue`` what
a project has; ``machine`` what is here. ``select``, ``changes``, ``shards`` and ``history`` make a ``plan``; ``plugin``
runs it with ``hygiene``; ``evidence`` is what remains, which ``verdict``, ``status``, ``debt`` and ``coverage`` read.

Nothing here imports another part of Lockstep: other projects use it with ``-p lockstep.lanes.plugin``.
"""

from __future__ import annotations

from lockstep.lanes.declare import Case, Disabled
from lockstep.lanes.errors import LanesError

__all__ = ["Case", "Disabled", "LanesError"]
