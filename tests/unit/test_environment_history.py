"""A switch of SGLang's DeepSeek-V4 over four releases, replayed: read, then declared and unused, then only warned
about, then gone. Its users dropped it, needed it again four days later, and then set it for nothing.

The planted packages have the shapes of the released wheels at the places that matter (``srt/environ.py``,
``deepseek_v4_backend.py``, ``deepseek_v4_memory_pool.py``, ``unified_kv_kernels/env_gate.py``). sglang#28612 removed
the first compressor, radixark/miles#2040 and #2139 are the recipes, sglang#35060 removed the switch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.environment.ledger import Ledger, judge
from lockstep.environment.readers import Package
from tests.unit.environment_planted import DESCRIPTORS, plant

SWITCH, BACKEND = "SGLANG_OPT_USE_COMPRESSOR_V2", "SGLANG_HACK_FLASHMLA_BACKEND"
UNIFIED = {BACKEND: "unified_kv_triton"}

FIELDS = """
class Envs:
    SGLANG_HACK_FLASHMLA_BACKEND = EnvStr("tilelang")
    {switch}

envs = Envs()
"""
GATE = '''"""Unified layout: controlled by SGLANG_HACK_FLASHMLA_BACKEND."""
from sglang.srt.environ import envs

def is_unified_kv_triton():
    return is_hip() and envs.SGLANG_HACK_FLASHMLA_BACKEND.get() == "unified_kv_triton"
'''
BEFORE = """
from sglang.srt.environ import envs
_is_hip = is_hip()

if envs.SGLANG_OPT_USE_COMPRESSOR_V2.get():
    from sglang.srt.layers.attention.dsv4.compressor_v2 import Compressor
else:
    from sglang.srt.layers.attention.dsv4.compressor import Compressor
"""
POOL = """
from sglang.srt.environ import envs
_is_hip = is_hip()

class Pool:
    def __init__(self, size, logical_size):
        self.indexer_size = logical_size if (not _is_hip or envs.SGLANG_OPT_USE_COMPRESSOR_V2.get()) else size
"""
AFTER = "from sglang.srt.layers.attention.dsv4.compressor_v2 import Compressor  # V2 is always used\n"
WARNED = """
class _DeprecatedEnv:
    def __init__(self, replacement=None):
        self.replacement = replacement

    def apply(self, old_name):
        if old_name not in os.environ:
            return
        warnings.warn(f"Environment variable {old_name} is deprecated.")
        if self.replacement is not None:
            os.environ[self.replacement] = os.environ[old_name]

_DEPRECATED_ENVS = {
    "SGLANG_GC_LOG": _DeprecatedEnv(replacement="SGLANG_LOG_GC"),
    # DSV4 compressor V2 is always used.
    "SGLANG_OPT_USE_COMPRESSOR_V2": _DeprecatedEnv(),
}

for old_name, deprecation in _DEPRECATED_ENVS.items():
    deprecation.apply(old_name)
"""


def sglang(folder: Path, state: str) -> Package:
    """The package "with the switch", "declared", "warned" or "gone"."""
    live = state == "with the switch"
    declared = "SGLANG_OPT_USE_COMPRESSOR_V2 = EnvBool(True)" if state in ("with the switch", "declared") else "pass"
    files = {
        "srt/environ.py": DESCRIPTORS + FIELDS.format(switch=declared) + (WARNED if state == "warned" else ""),
        "srt/layers/attention/deepseek_v4_backend.py": BEFORE if live else AFTER,
        "srt/mem_cache/deepseek_v4_memory_pool.py": POOL if live else "",
        "kernels/unified_kv_kernels/env_gate.py": GATE,
        "test/test_dsv4.py": "with envs.SGLANG_OPT_USE_COMPRESSOR_V2.override(False):\n    pass\n",
    }
    versions = {"with the switch": "0.5.14", "declared": "0.5.17", "warned": "0.5.19", "gone": "0.5.23"}
    return plant(folder, "sglang", files, versions[state])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def ledger(
    folder: Path, state: str, variables: dict[str, str], *, strict: bool = True, shell: dict[str, str] | None = None
) -> Ledger:
    packages = {"sglang": sglang(folder, state)}
    return judge({"engine": variables}, shell or {}, packages=packages, strict=strict, platform="rocm")


def rules(found: Ledger) -> list[tuple[str, str, str]]:
    return [(finding.severity, finding.rule, finding.name) for finding in found.findings if finding.severity != "note"]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("declared", "sglang 0.5.17 declares it and no code uses it"),
        ("warned", "sglang 0.5.19 lists it as deprecated and only warns about it"),
        ("gone", "sglang 0.5.23 does not know it"),
    ],
)
def test_false_after_the_reader_is_gone_is_caught(state: str, reason: str, tmp_path: Path) -> None:
    found = ledger(tmp_path, state, {SWITCH: "false"})
    assert rules(found) == [("error", "variable-unread", SWITCH)]
    assert reason in found.errors[0].message
    assert found.rows[0].read == "not read"
    assert rules(ledger(tmp_path, state, {SWITCH: "false"}, strict=False)) == [("warning", "variable-unread", SWITCH)]


def test_false_is_in_force_as_long_as_the_switch_is_read(tmp_path: Path) -> None:
    found = ledger(tmp_path, "with the switch", {SWITCH: "false"})
    assert rules(found) == []
    assert (found.rows[0].read, found.rows[0].effective) == ("read", "false")
    assert found.rows[0].places[0].startswith("srt/")


def test_the_unified_layout_without_the_switch_is_caught(tmp_path: Path) -> None:
    found = ledger(tmp_path, "with the switch", UNIFIED)
    assert rules(found) == [("error", "variable-contradicted", BACKEND)]
    assert f"needs {SWITCH}=true, and it is not set" in found.errors[0].message
    assert found.errors[0].repair == f"set {SWITCH}=true"


def test_the_unified_layout_against_the_switch_is_caught(tmp_path: Path) -> None:
    found = ledger(tmp_path, "with the switch", UNIFIED | {SWITCH: "0"})
    assert rules(found) == [("error", "variable-contradicted", BACKEND)]
    assert "it is '0'" in found.errors[0].message


@pytest.mark.parametrize("value", ["true", "1", "yes", "True"])
def test_the_unified_layout_with_the_switch_is_right(value: str, tmp_path: Path) -> None:
    assert rules(ledger(tmp_path, "with the switch", UNIFIED | {SWITCH: value})) == []


def test_the_switch_may_come_from_the_shell(tmp_path: Path) -> None:
    found = ledger(tmp_path, "with the switch", UNIFIED, shell={SWITCH: "true"})
    assert rules(found) == [("warning", "variable-stray", SWITCH)]


@pytest.mark.parametrize("state", ["declared", "warned", "gone"])
def test_removed_again_upstream_the_requirement_ends_and_the_switch_is_caught(state: str, tmp_path: Path) -> None:
    assert rules(ledger(tmp_path, state, UNIFIED)) == []
    assert rules(ledger(tmp_path, state, UNIFIED | {SWITCH: "true"})) == [("error", "variable-unread", SWITCH)]


def test_the_layout_of_another_platform_is_read_by_nobody(tmp_path: Path) -> None:
    packages = {"sglang": sglang(tmp_path, "gone")}
    found = judge({"engine": UNIFIED}, {}, packages=packages, strict=True, platform="cuda")
    assert rules(found) == [("error", "variable-unread", BACKEND)]
    assert "is_hip()" in found.errors[0].message


def test_where_the_engine_is_not_installed_nothing_is_claimed() -> None:
    found = judge({"engine": UNIFIED | {SWITCH: "true"}}, {}, packages={}, strict=True, platform="rocm")
    assert rules(found) == []
    assert {row.read for row in found.rows} == {"unknown"}
    assert "read by 0.5.12 to 0.5.14" in next(row.reason for row in found.rows if row.name == SWITCH)
