"""The scan of readers on the real vLLM: what it says is read, is read when vLLM runs, and what nobody reads is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.environment.readers import Answer, ask, installed_package

pytestmark = pytest.mark.lane("stage-a-vllm", hardware={"cpu": "cpu"}, minutes=1, owner="environment", labels=["vllm"])

READ = (
    "VLLM_BATCH_INVARIANT",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_LOGGING_LEVEL",
    "VLLM_CACHE_ROOT",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_PLUGINS",
)
UNREAD = ("VLLM_NO_SUCH_SWITCH", "VLLM_BATCH_INVARIANTS", "SGLANG_OPT_USE_COMPRESSOR_V2")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    package = installed_package("vllm")
    assert package is not None
    assert package.version.startswith("0.32")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    try:
        return ask(package, [*READ, *UNREAD, *registered()])
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


def registered() -> list[str]:
    """Every variable of vLLM's own registry, by vLLM itself."""
    import vllm.envs

    return sorted(vllm.envs.environment_variables)


@pytest.mark.parametrize("name", READ)
def test_what_vllm_reads_is_found(name: str, answers: dict[str, Answer]) -> None:
    assert answers[name].read == "read", answers[name]
    assert not answers[name].places[0].startswith("envs.py") or name != "VLLM_BATCH_INVARIANT"


@pytest.mark.parametrize("name", UNREAD)
def test_what_vllm_does_not_know_is_told(name: str, answers: dict[str, Answer]) -> None:
    assert answers[name].read == "not read", answers[name]


def test_a_near_name_is_offered(answers: dict[str, Answer]) -> None:
    assert answers["VLLM_BATCH_INVARIANTS"].near[0] == "VLLM_BATCH_INVARIANT"


def test_the_registry_is_understood(answers: dict[str, Answer]) -> None:
    """Entries of the registry are read, declared and unused, or undecided with a place; never unknown to the scan."""
    said = {name: answers[name] for name in registered()}
    assert len(said) > 150
    unknown_to_it = [name for name, answer in said.items() if "does not know it" in answer.reason]
    assert unknown_to_it == []
    read = [name for name, answer in said.items() if answer.read == "read"]
    assert len(read) > 0.8 * len(said)
    declared_only = {name for name, answer in said.items() if "declares it and no code uses it" in answer.reason}
    sources = [path for path in _sources() if path.name != "envs.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    assert not [name for name in declared_only if f"envs.{name}" in text]


def _sources() -> list[Path]:
    package = installed_package("vllm")
    assert package is not None
    assert package.root is not None
    return [path for path in package.root.rglob("*.py") if "test" not in path.parts]


def test_what_is_looked_up_at_import_was_said_to_be_read(answers: dict[str, Answer]) -> None:
    code = (
        "from lockstep.environment.recorded import recorded_reads\n"
        "with recorded_reads() as reads:\n    import vllm, vllm.envs, vllm.config, vllm.platforms\n"
        "print(*[name for name, by in reads.as_dict().items() if 'vllm' in by])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    looked_up = [name for name in done.stdout.split() if name.startswith("VLLM_") and name in answers]
    assert looked_up
    assert [name for name in looked_up if answers[name].read == "not read"] == []
