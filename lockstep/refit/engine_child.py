"""An engine in a process of its own, put together: rollout's server with refit's transports at its ends.

``python -m lockstep.refit.engine_child`` is what runs there (``start_engine`` starts it); nobody calls it by hand.
"""

from __future__ import annotations

import shutil
import sys
from typing import Any

from lockstep.refit.arrivals import Arrivals
from lockstep.rollout.engine_process import run
from lockstep.rollout.process_link import EngineProcess
from lockstep.rollout.remote_engine import RemoteEngine
from lockstep.rollout.vllm_start import EngineUnavailable


def start_engine(
    settings: dict[str, Any],
    *,
    timeout_s: float,
    python: str | None = None,
    environment: dict[str, str] | None = None,
) -> RemoteEngine:
    """Start an engine from JSON settings (``engine_process.build_engine``) in a process of its own and wait until it
    is there. It serves nothing before a refit commits.

    ``python`` is the interpreter of an environment that has this package (vLLM has one of its own); None: this one.
    ``environment`` are its variables; None: what crosses from this process (``environment.processes``).
    Raises EngineUnavailable if there is no such interpreter, EngineProcessError if the process does not come up, or the
    error of the engine's own construction.
    """
    if python is not None and shutil.which(python) is None:
        raise EngineUnavailable(
            f"rollout.python: there is no program {python}; name the interpreter of an environment that has Lockstep "
            "(make setup-vllm makes .venv-vllm/bin/python)"
        )
    command = [python or sys.executable, "-m", "lockstep.refit.engine_child"]
    return RemoteEngine(EngineProcess(command, settings, timeout_s=timeout_s, environment=environment))


def _derived_state() -> Any:
    from lockstep.refit.derived_vllm import registry

    return registry()


if __name__ == "__main__":
    sys.exit(run(Arrivals(), _derived_state))
