"""The ledger's rows and findings: faults by themselves, contradictions, what a shell adds, and that no secret shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.environment.catalogue import family_variables, reader_of, variables
from lockstep.environment.ledger import Ledger, LedgerFinding, judge, with_reads
from lockstep.environment.readers import Package
from tests.unit.environment_planted import DESCRIPTORS, LAMBDAS, plant

FIELDS = """
class Envs:
    SGLANG_DSV4_FP4_EXPERTS = EnvBool(True)
    SGLANG_OPT_USE_JIT_NORM = EnvBool(True)
    SGLANG_HACK_FLASHMLA_BACKEND = EnvStr("tilelang")
envs = Envs()
for one in (envs.SGLANG_DSV4_FP4_EXPERTS, envs.SGLANG_OPT_USE_JIT_NORM, envs.SGLANG_HACK_FLASHMLA_BACKEND):
    one.get()
timeout = int(os.getenv("SGLANG_HEALTH_CHECK_TIMEOUT", 20))
"""
USE = "import vllm.envs as envs\nprint(envs.VLLM_USED)\n"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Package]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return {
        "sglang": plant(tmp_path, "sglang", {"srt/environ.py": DESCRIPTORS + FIELDS}, "0.5.14"),
        "vllm": plant(tmp_path, "vllm", {"envs.py": LAMBDAS, "use.py": USE}, "0.32.0"),
    }


def found_in(ledger: Ledger, severity: str = "") -> list[tuple[str, str, str]]:
    return [(f.severity, f.rule, f.name) for f in ledger.findings if not severity or f.severity == severity]


def only(ledger: Ledger) -> LedgerFinding:
    (finding,) = ledger.findings
    return finding


@pytest.mark.parametrize(("strict", "severity"), [(True, "error"), (False, "warning")])
def test_an_unread_variable_is_a_warning_and_an_error_where_strict(
    strict: bool, severity: str, packages: dict[str, Package]
) -> None:
    declared = {"engine": {"SGLANG_NO_SUCH_SWITCH": "1"}}
    finding = only(judge(declared, {}, packages=packages, strict=strict))
    assert (finding.severity, finding.rule, finding.process) == (severity, "variable-unread", "engine")
    assert "sglang 0.5.14 does not know it" in finding.message


def test_a_misspelt_name_is_told_the_nearest(packages: dict[str, Package]) -> None:
    finding = only(judge({"engine": {"SGLANG_DSV4_FP4_EXPERT": "0"}}, {}, packages=packages))
    assert "did you mean SGLANG_DSV4_FP4_EXPERTS?" in finding.message


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("SGLANG_DSV4_FP4_EXPERTS", "0", False),
        ("SGLANG_DSV4_FP4_EXPERTS", "no", False),
        ("SGLANG_DSV4_FP4_EXPERTS", "never", True),
        ("SGLANG_HEALTH_CHECK_TIMEOUT", "120", False),
        ("SGLANG_HEALTH_CHECK_TIMEOUT", "2 min", True),
        ("SGLANG_HACK_FLASHMLA_BACKEND", "triton", False),
        ("SGLANG_HACK_FLASHMLA_BACKEND", "Triton", True),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", False),
        ("CUBLAS_WORKSPACE_CONFIG", "4096", True),
    ],
)
def test_a_value_that_the_reader_does_not_take_is_a_fault(
    name: str, value: str, refused: bool, packages: dict[str, Package]
) -> None:
    ledger = judge({"engine": {name: value}}, {}, packages=packages, strict=True)
    assert [rule for _, rule, _ in found_in(ledger, "error")] == (["variable-value"] if refused else [])


@pytest.mark.parametrize("value", ["1", "true", "True"])
def test_a_value_equal_to_the_default_is_a_note(value: str, packages: dict[str, Package]) -> None:
    ledger = judge({"engine": {"SGLANG_DSV4_FP4_EXPERTS": value}}, {}, packages=packages, strict=True)
    assert found_in(ledger) == [("note", "variable-default", "SGLANG_DSV4_FP4_EXPERTS")]


def test_a_variable_in_the_wrong_process_is_a_fault(packages: dict[str, Package]) -> None:
    ledger = judge({"engine": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}, "trainer": {}}, {}, packages=packages)
    assert found_in(ledger, "warning") == [("warning", "variable-process", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES")]
    assert only(ledger).repair == "move it to environment.trainer"


def test_a_pair_that_was_measured_to_drift_is_a_contradiction(packages: dict[str, Package]) -> None:
    declared = {"engine": {"SGLANG_HACK_FLASHMLA_BACKEND": "triton", "SGLANG_OPT_USE_JIT_NORM": "true"}}
    ledger = judge(declared, {}, packages=packages, strict=True)
    assert found_in(ledger, "error") == [("error", "variable-contradicted", "SGLANG_OPT_USE_JIT_NORM")]
    declared["engine"]["SGLANG_OPT_USE_JIT_NORM"] = "false"
    assert found_in(judge(declared, {}, packages=packages, strict=True), "error") == []


def test_a_contradiction_with_the_shell_is_found_too(packages: dict[str, Package]) -> None:
    declared = {"engine": {"SGLANG_HACK_FLASHMLA_BACKEND": "triton"}}
    ledger = judge(declared, {"SGLANG_OPT_USE_JIT_NORM": "1"}, packages=packages, strict=True)
    assert ("error", "variable-contradicted", "SGLANG_OPT_USE_JIT_NORM") in found_in(ledger)


def test_a_reader_that_is_a_binary_is_unknown_and_no_fault() -> None:
    ledger = judge({"trainer": {"NCCL_ALGO": "Ring", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}}, {}, packages={}, strict=True)
    assert ledger.findings == ()
    assert {row.read for row in ledger.rows} == {"unknown"}
    assert all("binary" in row.reason for row in ledger.rows)


def test_a_reader_that_is_not_installed_is_unknown_and_no_fault() -> None:
    ledger = judge({"engine": {"AITER_BF16_FP8_MOE_BOUND": "0"}}, {}, packages={}, strict=True)
    assert ledger.findings == ()
    assert ledger.rows[0].reason == "aiter is not installed here"


def test_a_name_that_another_package_reads_is_not_unread(tmp_path: Path, packages: dict[str, Package]) -> None:
    hub = "import os\nOFFLINE = os.environ.get('HF_HUB_OFFLINE', os.environ.get('TRANSFORMERS_OFFLINE', ''))\n"
    packages["transformers"] = plant(tmp_path, "transformers", {}, "5.19.0")
    declared = {"trainer": {"TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_CACHE": "/x", "HF_DATASETS_OFFLINE": "1"}}
    unread = found_in(judge(declared, {}, packages=packages, strict=True), "error")
    assert [name for *_, name in unread] == ["TRANSFORMERS_OFFLINE", "TRANSFORMERS_CACHE"]
    packages["huggingface_hub"] = plant(tmp_path, "huggingface_hub", {"constants.py": hub}, "2.4.0")
    ledger = judge(declared, {}, packages=packages, strict=True)
    assert [name for *_, name in found_in(ledger, "error")] == ["TRANSFORMERS_CACHE"]
    assert {row.name: row.reason for row in ledger.rows} == {
        "TRANSFORMERS_OFFLINE": "huggingface_hub 2.4.0 reads it",
        "TRANSFORMERS_CACHE": "transformers 5.19.0 does not know it",
        "HF_DATASETS_OFFLINE": "datasets is not installed here",
    }


@pytest.mark.parametrize(
    ("version", "platform", "told"),
    [
        ("2.13.0+cpu", "rocm", False),
        ("2.13.0+cpu", "cuda", False),
        ("2.13.0", "rocm", False),
        ("2.13.0+rocm7.2", "cuda", False),
        ("2.13.0+cpu", "cpu", True),
        ("2.13.0+rocm7.2", "rocm", True),
        ("2.13.0+cu130", "cuda", True),
        ("2.13.0", "cuda", True),
        ("2.13.0", "cpu", True),
        ("2.13.0+cpu", None, True),
    ],
)
def test_another_build_of_torch_than_the_runs_tells_nothing_of_what_it_lacks(
    version: str, platform: Any, told: bool, tmp_path: Path, packages: dict[str, Package]
) -> None:
    packages["torch"] = plant(tmp_path, "torch", {"hub.py": "import os\nos.getenv('TORCH_HOME')\n"}, version)
    declared = {"trainer": {"TORCH_HOME": "/x", "PYTORCH_TUNABLEOP_ENABLED": "1"}}
    ledger = judge(declared, {}, packages=packages, strict=True, platform=platform)
    assert [row.read for row in ledger.rows] == ["read", "not read" if told else "unknown"]
    assert len(ledger.errors) == told


def test_strays_of_the_shell_are_reported_once_with_their_effect(packages: dict[str, Package]) -> None:
    shell = {"VLLM_USED": "1", "VLLM_UNUSED": "1", "NCCL_DEBUG": "INFO", "PATH": "/bin", "EDITOR": "vi"}
    ledger = judge({"trainer": {}, "engine": {}}, shell, packages=packages, strict=True)
    strays = {f.name: f for f in ledger.findings}
    assert strays.keys() == {"VLLM_USED", "VLLM_UNUSED", "NCCL_DEBUG"}
    assert len(ledger.findings) == 3
    assert {f.severity for f in ledger.findings} == {"warning"}
    assert "it takes effect" in strays["VLLM_USED"].message
    assert "it has no effect" in strays["VLLM_UNUSED"].message
    assert "it may take effect" in strays["NCCL_DEBUG"].message
    assert [(row.process, row.inherited, row.effective) for row in ledger.rows if row.name == "VLLM_USED"] == [
        ("trainer", "1", "1"),
        ("engine", "1", "1"),
    ]


def test_a_declared_value_replaces_the_shells(packages: dict[str, Package]) -> None:
    ledger = judge({"engine": {"VLLM_USED": "0"}}, {"VLLM_USED": "1"}, packages=packages)
    (row,) = ledger.rows
    assert (row.declared, row.inherited, row.effective) == ("0", "1", "0")
    assert ("note", "variable-stray", "VLLM_USED") in found_in(ledger)


@pytest.mark.parametrize("value", ["a=b==c", "two words", "line\nline", "", "ünï"])
def test_odd_values_survive(value: str) -> None:
    ledger = judge({"trainer": {"MY_OWN_VARIABLE": value}}, {}, packages={})
    assert json.loads(json.dumps(ledger.as_dict()))["rows"][0]["effective"] == value


def test_no_secret_is_in_a_ledger() -> None:
    secret = "hunter2-hunter2"
    declared = {"trainer": {"HF_TOKEN": secret, "NVTE_API_KEY": secret}}
    ledger = judge(declared, {"VLLM_API_KEY": secret, "HF_TOKEN": secret + "2"}, packages={}, strict=True)
    assert secret not in json.dumps(ledger.as_dict()) + "".join(f.text() for f in ledger.findings) + repr(ledger)
    assert {row.effective for row in ledger.rows} == {"<secret>"}


def test_reads_at_run_time_are_filed_by_process() -> None:
    ledger = judge({"trainer": {"MY_A": "1", "MY_B": "1"}, "engine": {"MY_A": "2"}}, {}, packages={})
    rows = with_reads(ledger, {"trainer": {"MY_A": ["torch"]}}).rows
    assert [(row.process, row.name, row.read_at_run_time) for row in rows] == [
        ("trainer", "MY_A", True),
        ("trainer", "MY_B", False),
        ("engine", "MY_A", None),
    ]


# --- the catalogue ----------------------------------------------------------------------------------------------------


def test_every_entry_is_whole_and_agrees_with_itself() -> None:
    for name, variable in variables().items():
        assert variable.purpose, name
        assert variable.processes, name
        assert variable.source or variable.released == "nowhere", f"{name} has no source"
        if variable.default is not None:
            assert variable.refusal(variable.default) is None, name
        for condition in (*variable.requires, *variable.excludes):
            assert variable.refusal(condition.when) is None
            assert variables()[condition.name].refusal(condition.value) is None
            assert condition.reason


def test_every_entry_has_a_known_reader() -> None:
    assert all(reader_of(name) == variable.reader for name, variable in variables().items())
    assert reader_of("SGLANG_ANYTHING") == "sglang"
    assert reader_of("VLLM_ANYTHING") == "vllm"
    assert reader_of("EDITOR") is None


def test_history_names_where_it_is_recorded() -> None:
    entries = [line for variable in variables().values() for line in variable.history]
    assert entries
    assert all(re.match(r"[\w-]+#\d+: ", line) for line in entries)


def test_what_images_set_is_no_stray() -> None:
    shell = {
        "NCCL_VERSION": "2.27",
        "CUDA_VISIBLE_DEVICES": "0",
        "PATH": "/bin",
        "HF_HOME": "/x",
        "NCCL_IB_HCA": "mlx5",
    }
    assert family_variables(shell) == ["NCCL_IB_HCA"]
