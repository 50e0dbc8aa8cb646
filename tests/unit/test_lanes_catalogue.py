"""The catalogue is closed and agrees with itself; a machine is what its driver says, and a variable may not lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.lanes import LanesError
from lockstep.lanes.catalogue import load_catalogue
from lockstep.lanes.machine import VARIABLE, Machine, Run, detect
from tests.unit.lanes_planted import CATALOGUE, plant


def refused(tmp_path: Path, old: str, new: str) -> str:
    assert old in CATALOGUE
    with pytest.raises(LanesError) as error:
        load_catalogue(plant(tmp_path, {}, CATALOGUE.replace(old, new, 1)))
    return str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("default_minutes", "default_minuts", "unknown key default_minuts; known: stages"),
        ("default_minutes = 0.05", "", "default_minutes is missing"),
        ("default_minutes = 0.05", "default_minutes = 0", "default_minutes: expected a number above 0, got 0"),
        ('default_lane = "cpu"', 'default_lane = "one"', "default_lane: one has GPUs"),
        ('default_lane = "cpu"', 'default_lane = "cpus"', "default_lane: unknown lane cpus; known: cpu, cpu-long"),
        ('stage = "several"', 'stage = "many"', "lanes.four: unknown stage many; known: cpu, one-gpu"),
        ("num_gpus = 4\n[lanes.night]", "num_gpus = true\n[lanes.night]", "lanes.four: num_gpus: expected a whole"),
        ('{hardware = "h200", num_gpus = 1', '{hardware = "h100", num_gpus = 1', "unknown hardware h100"),
        ('vendors = ["rocm"]', 'vendors = ["amd"]', "labels.run-amd: unknown vendor amd; known: cpu, cuda, rocm"),
        ("[labels]\n", "[labels]\nx = 3\n", "labels.x: expected a table, got 3"),
        ('labels = ["ubuntu-24.04"]', "labels = []", "may land on"),
    ],
)
def test_a_faulty_catalogue_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert says in refused(tmp_path, old, new)


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    text = refused(tmp_path, 'default_lane = "cpu"', "default_lane = 3\nwrong = 1\nalways_runs = []")
    assert len(text.splitlines()) == 3


def test_an_image_serves_one_family(tmp_path: Path) -> None:
    """Fault H6: one image was used for two families of GPU."""
    text = refused(tmp_path, 'labels = ["self-hosted", "mi350-4"], image = "mi350"',
                   'labels = ["self-hosted", "mi350-4"], image = "mi300x"')  # fmt: skip
    assert "runners.mi350-4: image mi300x is of family gfx942, mi350 of gfx950" in text
    text = refused(tmp_path, 'reference = "lanes:gfx950"', 'reference = "lanes:gfx942"')
    assert "images.mi350: lanes:gfx942 is the image of family gfx942 too" in text
    assert "needs an image of family sm90" in refused(tmp_path, ', image = "cuda"', "")


def test_labels_that_another_machine_has_too_are_refused(tmp_path: Path) -> None:
    text = refused(tmp_path, 'labels = ["self-hosted", "h200-1"]', 'labels = ["self-hosted"]')
    assert "a job for ['self-hosted'] may land on runners.mi300x-1 (mi300x)" in text


def test_the_table_may_lie_in_pyproject(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.lockstep.lanes]\nstages = ["cpu"]\ndefault_lane = "a"\ndefault_minutes = 1\n'
        '[tool.lockstep.lanes.lanes.a]\nstage = "cpu"\n'
    )
    assert load_catalogue(tmp_path).default_lane == "a"
    with pytest.raises(LanesError, match=r"has no lanes.toml and no \[tool.lockstep.lanes\]"):
        load_catalogue(plant(tmp_path / "empty", {}).parent / "nowhere")


# --- the machine ------------------------------------------------------------------------------------------------------


def tools(**outputs: str) -> Run:
    """Driver tools that print these texts; others are absent."""

    def run(command: Sequence[str]) -> str | None:
        return outputs.get(command[0].replace("-", "_"))

    return run


def machine(tmp_path: Path, environment: dict[str, str] | None = None, **outputs: str) -> Machine:
    catalogue = load_catalogue(plant(tmp_path / "project", {}))
    return detect(catalogue, environment or {}, tmp_path / "root", tools(**outputs))


MI300X = """{"card0": {"Card Series": "AMD Instinct MI300X"},
"card1": {"Card Series": "N/A", "Card Model": "AMD Instinct MI300X"}, "system": {}}"""


def test_the_drivers_tools_are_asked(tmp_path: Path) -> None:
    nvidia = machine(tmp_path, nvidia_smi="NVIDIA H200\nNVIDIA H200\n")
    assert (nvidia.vendor, nvidia.hardware, nvidia.devices) == ("cuda", "h200", ("NVIDIA H200", "NVIDIA H200"))
    amd = machine(tmp_path, rocm_smi=MI300X)
    assert (amd.vendor, amd.hardware, len(amd.devices)) == ("rocm", "mi300x", 2)
    assert machine(tmp_path).hardware == "cpu"


def test_a_whole_name_is_needed(tmp_path: Path) -> None:
    assert machine(tmp_path, nvidia_smi="NVIDIA H200 NVL\n").hardware is None
    assert machine(tmp_path, nvidia_smi="NVIDIA H200\nNVIDIA A100\n").hardware is None


def test_the_kernels_files_are_read_where_the_tools_are_absent(tmp_path: Path) -> None:
    gpu = tmp_path / "root/proc/driver/nvidia/gpus/0000:01:00.0/information"
    gpu.parent.mkdir(parents=True)
    gpu.write_text("Model: \t\t NVIDIA H200\nIRQ: 5\n")
    assert machine(tmp_path).hardware == "h200"


def test_a_device_that_only_the_kernel_names_is_named_by_the_variable(tmp_path: Path) -> None:
    for node, text in {
        "0": "simd_count 0\ngfx_target_version 0\n",
        "1": "simd_count 4\ngfx_target_version 90500\n",
    }.items():
        folder = tmp_path / f"root/sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text(text)
    seen = machine(tmp_path)
    assert (seen.vendor, seen.devices, seen.hardware) == ("rocm", ("gfx950",), None)
    assert machine(tmp_path, {VARIABLE: "mi350"}).hardware == "mi350"
    with pytest.raises(LanesError, match="mi300x is of family gfx942, but a device is gfx950"):
        machine(tmp_path, {VARIABLE: "mi300x"})
    assert machine(tmp_path / "other", {VARIABLE: "mi350"}, rocm_smi='{"card0": {}}').hardware == "mi350"


@pytest.mark.parametrize(
    ("wanted", "outputs", "says"),
    [
        ("mi300x", {"nvidia_smi": "NVIDIA H200\n"}, "says rocm, but the device is NVIDIA H200"),
        ("h200", {"rocm_smi": MI300X}, "says cuda, but the device is AMD Instinct MI300X"),
        (
            "mi350",
            {"rocm_smi": MI300X},
            "LOCKSTEP_LANES_HARDWARE=mi350 says rocm, but the device is AMD Instinct MI300X",
        ),
        ("h200", {}, "the device is no GPU"),
        (
            "h200",
            {"nvidia_smi": "NVIDIA H200 NVL\n"},
            "a device is NVIDIA H200 NVL (nvidia-smi), which device_names",
        ),
        ("h200", {"nvidia_smi": "NVIDIA H200\nNVIDIA A100\n"}, "a device is NVIDIA A100"),
        ("mi350", {"rocm_smi": '{"card0": {"Card Series": "AMD Instinct MI250X"}}'}, "a device is AMD Instinct MI250X"),
        ("h300", {"nvidia_smi": "NVIDIA H200\n"}, "is not in the catalogue; known: cpu, h200"),
    ],
)
def test_a_variable_that_contradicts_the_device_is_refused(
    tmp_path: Path, wanted: str, outputs: dict[str, str], says: str
) -> None:
    with pytest.raises(LanesError) as error:
        machine(tmp_path, {VARIABLE: wanted}, **outputs)
    assert says in str(error.value)


def test_less_than_is_there_may_be_asked_for(tmp_path: Path) -> None:
    assert machine(tmp_path, {VARIABLE: "cpu"}, nvidia_smi="NVIDIA H200\n").hardware == "cpu"
    assert machine(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}, nvidia_smi="NVIDIA H200\n").vendor == "cpu"
    four = "NVIDIA H200\n" * 4
    assert len(machine(tmp_path, {"CUDA_VISIBLE_DEVICES": "2,3"}, nvidia_smi=four).devices) == 2


def test_cards_of_two_vendors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LanesError, match="cards of two vendors are here"):
        machine(tmp_path, nvidia_smi="NVIDIA H200\n", rocm_smi=MI300X)


def test_an_answer_that_is_no_json_is_no_device(tmp_path: Path) -> None:
    assert machine(tmp_path, rocm_smi="ERROR: no driver").vendor == "cpu"
