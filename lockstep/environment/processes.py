"""What each process gets: declared variables reach it, others of the shell by an allow-list.

Copying a whole environment to a worker fails on odd shells (exported functions, megabytes of variables) and carries
secrets where nobody needs them. So an engine's process gets: what a Unix program needs, where libraries and devices
are, the families of variables that engines and kernels read (the ledger reports those), and what the configuration
declares for it. A secret crosses only if it is declared.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lockstep.config.errors import ConfigError, Violation
from lockstep.config.secrets import MASK, is_secret
from lockstep.environment.catalogue import FAMILIES, variables

ALLOWED = frozenset(
    {
        *("HOME", "USER", "LOGNAME", "SHELL", "PATH", "PWD", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "TMP", "TEMP"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "CC", "CXX", "CUDACXX", "VIRTUAL_ENV", "HOSTNAME"),
        *("ROCM_PATH", "ROCM_HOME", "GPU_DEVICE_ORDINAL", "NO_COLOR", "COLUMNS", "MAX_JOBS", "SSL_CERT_FILE"),
        *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "REQUESTS_CA_BUNDLE"),
    }
)
"""Names that cross to a child."""

ALLOWED_PREFIXES = (
    *("LC_", "XDG_", "PYTHON", "CONDA_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "NUMEXPR_"),
    *("HF_", "TRANSFORMERS_", "TOKENIZERS_", "SAFETENSORS_", "MALLOC_", "NVIDIA_", "GLOO_", "UCX_", "FI_", "IB"),
    *("COVERAGE_", "COV_", "LOCKSTEP_"),
)
"""Beginnings of names that cross, besides the families that the ledger knows."""


def crosses(name: str) -> bool:
    """Whether a variable of the shell reaches a child that does not declare it."""
    if is_secret(name):
        return False
    return name in ALLOWED or name in variables() or name.startswith((*ALLOWED_PREFIXES, *FAMILIES))


def child_environment(shell: Mapping[str, str], declared: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child: what crosses from the shell, and over it what is declared for it. Values are taken as
    they are, with ``=``, spaces and newlines. Raises ConfigError for a secret that is to come from a shell that has
    none."""
    kept = {name: value for name, value in shell.items() if crosses(name) and not re.search(r"[^A-Za-z0-9_]", name)}
    return kept | resolve_secrets(declared, shell)


def resolve_secrets(declared: Mapping[str, str], shell: Mapping[str, str]) -> dict[str, str]:
    """Declared variables with ``<secret>`` replaced by the shell's value. Raises ConfigError naming every one that the
    shell does not have."""
    missing = sorted(name for name, value in declared.items() if value == MASK and not shell.get(name))
    if missing:
        way_out = "export it before the start; secrets are never written into a configuration or a run folder"
        raise ConfigError(
            "environment",
            [Violation(name, "is to come from the shell, which does not have it", way_out) for name in missing],
        )
    return {name: shell[name] if value == MASK else value for name, value in declared.items()}


_shells: list[dict[str, str]] = []
"""The environment before each ``applied`` that is in force, outermost first."""


@contextmanager
def applied(declared: Mapping[str, str]) -> Iterator[None]:
    """This process with the declared variables set; afterwards as before. ``shell_environment`` is what was before."""
    before = dict(os.environ)
    values = resolve_secrets(declared, before)
    _shells.append(before)
    os.environ.update(values)
    try:
        yield
    finally:
        _shells.pop()
        for name, value in values.items():
            if os.environ.get(name) == value:  # what somebody else has set since stays
                if name in before:
                    os.environ[name] = before[name]
                else:
                    del os.environ[name]


def shell_environment() -> dict[str, str]:
    """The environment that this process was started with, without what ``applied`` has set for it alone."""
    return dict(_shells[0]) if _shells else dict(os.environ)
