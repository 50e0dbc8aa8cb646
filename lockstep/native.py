"""The few C kernels of this package: compiled at their first use, with a reason wherever there is none.

A kernel is one ``.c`` file beside the module that uses it, compiled with the system's C compiler for the processor at
hand and kept in the user's cache folder under a name that changes with the source, the compiler, its options and the
processor. Every kernel has a twin in torch or numpy that its module uses where this fails, and is tried against that
twin before it is trusted.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_COMPILE = ("-O3", "-march=native", "-fPIC", "-fopenmp")


class NoKernel(RuntimeError):
    """A kernel can't be had here; the text says why."""


def load_kernel(source: Path, options: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The shared library of a C file, compiled if this source, compiler and processor haven't met before.

    Raises NoKernel if there is no compiler, or it or the loader fails.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NoKernel("no C compiler (cc, gcc or clang) was found")
    try:
        return ctypes.CDLL(str(_built(compiler, source, (*_COMPILE, *options))))
    except subprocess.CalledProcessError as error:
        raise NoKernel(f"{compiler} failed: {error.stderr.strip()[-300:]}") from error
    except OSError as error:
        raise NoKernel(f"the compiled kernel can't be loaded: {error}") from error


def _built(compiler: str, source: Path, options: tuple[str, ...]) -> Path:
    text = source.read_text()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    mark = "\n".join([text, version, " ".join(options), platform.machine(), _processor()])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
    library = folder / f"{source.stem}-{hashlib.sha256(mark.encode()).hexdigest()[:16]}.so"
    if library.is_file():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        compiled, linked = Path(scratch) / "kernel.o", Path(scratch) / "kernel.so"
        # Linked without -fopenmp: the OpenMP calls must find torch's own runtime (loaded globally), not a second one
        # whose idle threads would fight with torch's for the cores.
        for command in (
            [*options, "-c", str(source), "-o", str(compiled)],
            ["-shared", str(compiled), "-o", str(linked)],
        ):
            subprocess.run([compiler, *command], capture_output=True, text=True, check=True)
        linked.replace(library)
    return library


def _processor() -> str:
    """What -march=native depends on: the kernel's list of instruction sets, where there is one."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return platform.processor()
    return next((line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))), "")
