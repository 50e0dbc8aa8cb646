"""AMD GPUs, one resolver for three visibility variables, capabilities by asking, and what a configuration needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.errors import ConfigError
from lockstep.config.schema import RunConfig
from lockstep.driver.doctor_commands import examine_all, render_all
from lockstep.driver.needs import needs_of, refuse_absent_hardware
from lockstep.hardware.capabilities import (
    Capability,
    capabilities,
    fp8,
    large_allocation_problem,
    memory_saver,
    mesh_unflatten,
    shared_memory,
    sleep_mode,
)
from lockstep.hardware.cuda import Cuda, Gpu
from lockstep.hardware.doctor import render
from lockstep.hardware.mesh import two_axis_mesh
from lockstep.hardware.profile import Profile, choose
from lockstep.hardware.rocm import Rocm, architecture, detect_rocm, physical_gpus
from lockstep.hardware.visibility import platform_here, visibility_problems, visible_devices
from tests.unit.test_hardware import CPU, NO_CUDA, PROFILE, machine, run_config

NODE = "sys/class/kfd/kfd/topology/nodes"
MI355X = {
    f"{NODE}/0/properties": "cpu_cores_count 64\nsimd_count 0\ngfx_target_version 0\n",
    f"{NODE}/1/properties": "cpu_cores_count 0\nsimd_count 1024\ngfx_target_version 90500\n",
    f"{NODE}/1/mem_banks/0/properties": f"heap_type 1\nsize_in_bytes {309_220_868_096}\n",
    f"{NODE}/10/properties": "simd_count 1024\ngfx_target_version 90500\n",
    f"{NODE}/10/mem_banks/0/properties": f"size_in_bytes {309_220_868_096}\n",
    "sys/module/amdgpu/version": "6.12.12\n",
}
AMD_GPU = Gpu(0, "AMD Instinct MI355X", (9, 5), 309_220_868_096, 280 * 10**9, bf16=True, arch="gfx950")
AMD = Rocm((AMD_GPU,), (), "1 visible of 1", "6.12", "7.0")
H200 = Gpu(0, "NVIDIA H200", (9, 0), 143771 << 20, 140000 << 20, bf16=True)
ON_AMD = replace(PROFILE, rocm=AMD)
ON_H200 = replace(PROFILE, cuda=Cuda((H200,), "1 visible", "580", "13.0"))


def on(hardware: str, **changes: Any) -> RunConfig:
    config = run_config()
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"hardware": hardware, **changes})})


# --- what the driver lists --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "name"),
    [(90402, "gfx942"), (90500, "gfx950"), (90010, "gfx90a"), (110001, "gfx1101"), (120001, "gfx1201")],
)
def test_the_drivers_number_is_the_architectures_name(version: int, name: str) -> None:
    assert architecture(version) == name


def test_gpus_are_listed_in_the_drivers_order_without_cpus(tmp_path: Path) -> None:
    found = physical_gpus(machine(tmp_path, MI355X))
    assert [(gpu.node, gpu.arch, gpu.memory_bytes) for gpu in found] == [
        (1, "gfx950", 309_220_868_096),
        (10, "gfx950", 309_220_868_096),
    ]


def test_no_driver_is_an_answer_not_a_crash(tmp_path: Path) -> None:
    rocm = detect_rocm({}, tmp_path)
    assert (rocm.gpus, rocm.physical, rocm.driver, rocm.problems) == ((), (), None, ())


def test_gpus_that_this_torch_cannot_use_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "hip", None)
    rocm = detect_rocm({}, machine(tmp_path, MI355X))
    ((wrong, way_out),) = rocm.problems
    assert "2 AMD GPU(s) (gfx950) are here" in wrong
    assert "ROCm build" in way_out
    assert rocm.driver == "6.12.12"


def test_torchs_rocm_build_is_asked_for_the_visible_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    properties = SimpleNamespace(name="AMD Instinct MI300X", major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (190, 192))
    rocm = detect_rocm({}, machine(tmp_path, MI355X))
    assert [(gpu.arch, gpu.memory_total_bytes) for gpu in rocm.gpus] == [("gfx942", 192)]
    assert rocm.reason == "1 visible of 2"
    assert any("/dev/kfd can't be opened" in wrong for wrong, _ in rocm.problems)


def test_hidden_gpus_say_by_which_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    rocm = detect_rocm({"ROCR_VISIBLE_DEVICES": "-1"}, machine(tmp_path, MI355X))
    assert rocm.reason == "ROCR_VISIBLE_DEVICES hides all GPUs"


def test_a_node_that_may_not_be_read_is_left_out(tmp_path: Path) -> None:
    root = machine(tmp_path, {f"{NODE}/1/properties": "simd_count x\ngarbage\n"})
    (root / NODE / "2").mkdir()
    assert physical_gpus(root) == ()


# --- visibility -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "environment", "devices"),
    [
        ("cuda", {}, None),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "2,3"}, ["2", "3"]),
        ("cuda", {"CUDA_VISIBLE_DEVICES": ""}, []),
        ("cuda", {"HIP_VISIBLE_DEVICES": "1"}, None),
        ("rocm", {"HIP_VISIBLE_DEVICES": "2,3"}, ["2", "3"]),
        ("rocm", {"CUDA_VISIBLE_DEVICES": "1"}, ["1"]),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "4,5"}, ["4", "5"]),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1"}, ["5"]),
        (
            "rocm",
            {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"},
            ["4", "5"],
        ),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "1"}, ["5"]),
        ("cpu", {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}, []),
    ],
)
def test_one_resolver_knows_what_three_variables_leave(
    platform: Any, environment: dict[str, str], devices: list[str] | None
) -> None:
    assert visibility_problems(environment, platform) == []
    assert visible_devices(environment, platform) == devices


@pytest.mark.parametrize(
    ("platform", "environment", "fragment"),
    [
        ("rocm", {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "4,5"}, "counts among the 2 device(s)"),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, "there is no 1"),
        ("rocm", {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, "disagree"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}, "this is CUDA"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "1"}, "this is CUDA"),
    ],
)
def test_visibility_variables_that_disagree_are_refused(
    platform: Any, environment: dict[str, str], fragment: str
) -> None:
    """(I7) A layer below, Ray for one, has set another variable than the shell."""
    ((wrong, way_out),) = visibility_problems(environment, platform)
    assert fragment in wrong
    assert way_out
    with pytest.raises(ValueError, match="_VISIBLE_DEVICES"):
        visible_devices(environment, platform)


@given(rocr=st.lists(st.integers(0, 7), unique=True, min_size=1), pick=st.data())
def test_hip_counts_within_what_rocr_leaves(rocr: list[int], pick: st.DataObject) -> None:
    hip = pick.draw(st.lists(st.sampled_from(range(len(rocr))), unique=True))
    names = {"ROCR_VISIBLE_DEVICES": ",".join(map(str, rocr)), "HIP_VISIBLE_DEVICES": ",".join(map(str, hip))}
    assert visible_devices(names, "rocm") == [str(rocr[index]) for index in hip]


@pytest.mark.parametrize(
    ("build", "files", "platform"),
    [
        ("2.13.0", {"proc/driver/nvidia/version": "x"}, "cuda"),
        ("2.13.0+cu130", {"proc/driver/nvidia/version": "x"}, "cuda"),
        ("2.13.0+cpu", {"proc/driver/nvidia/version": "x"}, "cpu"),
        ("2.13.0+rocm7.0", {"dev/kfd": ""}, "rocm"),
        ("2.13.0+rocm7.0", {}, "cpu"),
        ("2.13.0", {}, "cpu"),
    ],
)
def test_the_platform_is_what_machine_and_torch_have_in_common(
    build: str, files: dict[str, str], platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.hardware import visibility

    monkeypatch.setattr(visibility.metadata, "version", lambda _: build)
    assert platform_here(machine(tmp_path, files)) == platform


# --- capabilities -----------------------------------------------------------------------------------------------------


def test_a_private_method_is_asked_for_and_not_a_version() -> None:
    class Old: ...

    class New:
        def _unflatten(self) -> None: ...

    old, new = mesh_unflatten(Old), mesh_unflatten(New)
    assert (old.present, new.present) == (False, True)
    assert "a mesh of two axes is built" in old.otherwise


@pytest.mark.parametrize("present", [True, False])
def test_both_ways_to_a_mesh_of_two_axes_place_every_rank_alike(present: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from lockstep.hardware import mesh

    real = mesh_unflatten()
    if present and not real.present:
        pytest.skip("this torch has no _unflatten")
    monkeypatch.setattr(mesh, "mesh_unflatten", lambda: replace(real, present=present))
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    try:
        made = two_axis_mesh("cpu", (2, 4), ("replicate", "shard"))
        assert made.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert made.mesh_dim_names == ("replicate", "shard")
        assert (made.get_local_rank("replicate"), made.get_local_rank("shard")) == (1, 1)
        with pytest.raises(ValueError, match="replicate 2 · shard 3 = 6 is not the world of 8"):
            two_axis_mesh("cpu", (2, 3), ("replicate", "shard"))
    finally:
        dist.destroy_process_group()


def test_the_fp8_dialect_follows_the_architecture() -> None:
    old = fp8((replace(AMD_GPU, arch="gfx942"),), "amd")
    assert (old.present, "e4m3fnuz" in old.reason, "scales doubled" in old.otherwise) == (True, True, True)
    assert "e4m3fn" in fp8((AMD_GPU,), "amd").reason
    assert fp8((H200,), "nvidia").present
    assert not fp8((replace(H200, capability=(8, 0)),), "nvidia").present
    assert not fp8((), "cpu").present


def test_sleep_is_probed_and_has_a_named_fallback() -> None:
    """(I6) Colocation assumed that every build can give its memory back."""
    without = sleep_mode((AMD_GPU,), find=lambda name: object() if name == "vllm" else None)
    with_it = sleep_mode((AMD_GPU,), find=lambda _: object())
    assert (without.present, with_it.present) == (False, True)
    assert "plan for both" in without.otherwise


def test_the_memory_saver_is_off_on_hip_unless_a_large_allocation_was_tried() -> None:
    """(I13) Large models failed to load: on HIP a large allocation must be made in chunks."""
    tried: list[int] = []

    def problem(says: str | None) -> Callable[[], str | None]:
        return lambda: (tried.append(1), says)[1]

    free = replace(AMD_GPU, memory_free_bytes=200 << 30)
    fails = memory_saver((free,), "amd", lambda _: object(), problem("hipError 2 in cu_mem_create"))
    works = memory_saver((free,), "amd", lambda _: object(), problem(None))
    assert (fails.present, works.present, len(tried)) == (False, True, 2)
    assert "cu_mem_create" in fails.reason
    assert "plan for both" in fails.otherwise
    full = memory_saver((replace(free, memory_free_bytes=1 << 30),), "amd", lambda _: object(), problem(None))
    assert (full.present, full.reason[:9], len(tried)) == (False, "not tried", 2)
    assert not memory_saver((free,), "amd", lambda _: None, problem(None)).present
    assert memory_saver((H200,), "nvidia", lambda _: object(), problem("never asked")).present
    assert not memory_saver((), "cpu").present
    assert len(tried) == 2


def test_the_probe_of_the_memory_saver_says_what_went_wrong() -> None:
    """There is no such extension here: the child's own error is the reason."""
    assert "torch_memory_saver" in str(large_allocation_problem())


def test_shared_memory_is_tried() -> None:
    def refused(_: str) -> int:
        raise OSError(1, "Operation not permitted")

    assert shared_memory().present
    broken = shared_memory(refused)
    assert (broken.present, broken.reason) == (False, "memfd_create: Operation not permitted")


def test_every_capability_says_what_happens_without_it() -> None:
    assert all(one.reason and one.otherwise for one in capabilities())
    assert len({one.name for one in capabilities()}) == len(capabilities())


# --- choices and needs ------------------------------------------------------------------------------------------------


def test_an_amd_gpu_is_chosen_by_torchs_name_for_it() -> None:
    device = choose(ON_AMD, None, {})[0]
    assert (device.value, device.reason) == ("cuda", "AMD Instinct MI355X is usable")
    assert (ON_AMD.vendor, ON_H200.vendor, PROFILE.vendor) == ("amd", "nvidia", "cpu")


@pytest.mark.parametrize(
    ("profile", "hardware", "here"),
    [
        (ON_AMD, "mi355x", True),
        (ON_AMD, "mi350x", False),  # the same architecture and memory: the name alone tells them apart
        (replace(PROFILE, rocm=replace(AMD, gpus=(replace(AMD_GPU, name="AMD Instinct MI350X"),))), "mi350x", True),
        (replace(PROFILE, rocm=replace(AMD, gpus=(replace(AMD_GPU, name="AMD Instinct MI350X"),))), "mi355x", False),
        (replace(PROFILE, rocm=replace(AMD, gpus=(replace(AMD_GPU, name="AMD Radeon Graphics"),))), "mi350x", True),
        (ON_AMD, "mi300x", False),  # another architecture
        (ON_AMD, "h200", False),
        (ON_H200, "h200", True),
        (ON_H200, "h100", False),  # the same architecture, and evidence would be of another device
        (ON_H200, "gb300", False),
        (PROFILE, "h200", False),
        (PROFILE, "cpu", True),
        (ON_H200, "cpu", True),
        (replace(PROFILE, cuda=Cuda((replace(H200, memory_total_bytes=80 << 30),), "1", "5", "12")), "h200", False),
    ],
)
def test_hardware_that_is_not_here_is_refused(profile: Profile, hardware: str, here: bool) -> None:
    if here:
        refuse_absent_hardware(on(hardware), profile)
        return
    with pytest.raises(ConfigError, match=rf"cluster\.hardware[\s\S]*{hardware}[\s\S]*way out"):
        refuse_absent_hardware(on(hardware), profile)


def test_too_few_devices_and_machines_are_named_together() -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_absent_hardware(on("h200", nodes=2, gpus_per_node=8), ON_H200)
    assert [v.key for v in refused.value.violations] == ["cluster.gpus_per_node", "cluster.nodes"]
    assert "8 device(s) on each machine: 1 visible" in str(refused.value)


def test_a_recipe_that_names_nothing_needs_nothing_of_the_hardware() -> None:
    refuse_absent_hardware(run_config(), replace(PROFILE, cuda=NO_CUDA))


@pytest.mark.parametrize(
    ("transport", "probe", "way_out"),
    [("cuda_ipc", "memory_handles", 'transport = "shm"'), ("shm", "shared_memory", 'transport = "disk"')],
)
def test_memory_that_cannot_be_shared_is_refused_at_the_start_with_the_other_transport(
    transport: str, probe: str, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.driver import needs

    base = run_config()
    config = base.model_copy(update={"refit": base.refit.model_copy(update={"transport": transport})})
    for present in (True, False):
        answer = Capability("memory", present, "it was tried", "-")
        monkeypatch.setattr(needs, probe, lambda *_, answer=answer: answer)
        if present:
            refuse_absent_hardware(config, PROFILE)
            continue
        with pytest.raises(ConfigError) as refused:
            refuse_absent_hardware(config, PROFILE)
        (violation,) = refused.value.violations
        assert (violation.key, way_out in violation.way_out) == ("refit.transport", True)
        assert "it was tried" in violation.message


def test_memory_handles_need_a_gpu() -> None:
    base = run_config()
    config = base.model_copy(update={"refit": base.refit.model_copy(update={"transport": "cuda_ipc"})})
    with pytest.raises(ConfigError, match="memory handles between processes for transport cuda_ipc: no GPU"):
        refuse_absent_hardware(config, replace(PROFILE, cuda=NO_CUDA))


def test_needs_name_engine_model_and_files() -> None:
    config = run_config()
    rollout = config.rollout.model_copy(update={"engine": "vllm", "process": "separate", "python": "/no/such/python"})
    needs = {need.key: need for need in needs_of(config.model_copy(update={"rollout": rollout}), PROFILE)}
    assert needs.keys() == {"rollout.python", "rollout.engine", "model.package"}
    assert not any(need.here for need in needs.values())
    assert all(need.way_out for need in needs.values())


def test_the_doctor_shows_amd_capabilities_and_what_a_recipe_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_STRAY_SWITCH", "1")
    monkeypatch.setenv("NCCL_API_KEY", "hunter2-hunter2")
    result = examine_all(on("mi355x"))
    text = render_all(result)
    assert "rocm       " in text
    assert "split mesh axes" in text
    assert "missing  mi355x (amd gfx950, 309 GB): " in text
    assert "SGLANG_STRAY_SWITCH=1 comes from the shell" in text
    assert "hunter2" not in text + str(result)
    assert any(not need["here"] for need in result["needs"])


def test_an_amd_machine_is_rendered() -> None:
    from dataclasses import asdict

    shown = {
        "profile": asdict(ON_AMD) | {"device_kind": "cuda", "device_name": "x"},
        "engines": {"torch": "2.13", "vllm": None},
        "choices": [],
        "capabilities": [asdict(fp8((replace(AMD_GPU, arch="gfx942"),), "amd"))],
        "problems": [],
        "notes": [],
    }
    text = render(shown)
    assert "gpu 0      AMD Instinct MI355X, gfx950, 280.0 GB of 309.2 GB free" in text
    assert "e4m3fnuz; checkpoints in e4m3fn are converted, with their scales doubled" in text
    assert CPU.name in text
