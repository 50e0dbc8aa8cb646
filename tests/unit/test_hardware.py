"""Hardware: limits of affinity and cgroups, bfloat16 support, GPU visibility, and choices with their reasons."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.config.cluster_schema import ClusterConfig
from lockstep.config.errors import ConfigError
from lockstep.config.schema import ArithmeticTask, BoundConfig, GateConfig, GgufModel, RunConfig
from lockstep.hardware.cpu import Cpu, detect_cpu
from lockstep.hardware.cuda import Cuda, Gpu, detect_cuda
from lockstep.hardware.doctor import examine, render
from lockstep.hardware.profile import Choice, Profile, choose, detect, missing_dependencies

GB = 1024**3
CPU = Cpu("Some CPU", 8, "cores in the affinity mask", 64 * GB, 60 * GB, "memory of the machine", "avx512_bf16")
GPU = Gpu(0, "Some GPU", (9, 0), 80 * GB, 79 * GB, bf16=True)
NO_CUDA = Cuda((), "no NVIDIA driver is loaded", None, None)
PROFILE = Profile(CPU, NO_CUDA, "3.11.0", "Linux", {"torch": "2.13.0"}, 100 * GB)


def machine(root: Path, files: dict[str, str]) -> Path:
    """A folder that looks like the root of a machine with 8 GB, and the given files."""
    base = {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Test CPU\nflags\t\t: fpu avx512f avx512_bf16\n",
        "proc/meminfo": "MemTotal:        8388608 kB\nMemFree: 1 kB\nMemAvailable:    4194304 kB\n",
        "proc/self/cgroup": "0::/job/step\n",
    }
    for name, text in (base | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def run_config(**changes: object) -> RunConfig:
    config = RunConfig(
        name="t",
        steps=1,
        model=GgufModel(package="p"),
        task=ArithmeticTask(),
        gate=GateConfig(bounds=(BoundConfig(bound=0.1, evidence="test"),)),
    )
    return config.model_copy(update=changes)


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def by_setting(choices: tuple[Choice, ...]) -> dict[str, Choice]:
    return {choice.setting: choice for choice in choices}


# --- cpu --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("eight_cores")
def test_without_limits_the_machine_itself_counts(tmp_path: Path) -> None:
    cpu = detect_cpu(machine(tmp_path, {}))
    assert (cpu.name, cpu.num_cores, cpu.bf16_flag) == ("Test CPU", 8, "avx512_bf16")
    assert (cpu.memory_total_bytes, cpu.memory_available_bytes) == (8 * GB, 4 * GB)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"sys/fs/cgroup/job/step/cpu.max": "150000 100000\n"}, 2),
        ({"sys/fs/cgroup/job/step/cpu.max": "max 100000\n", "sys/fs/cgroup/job/cpu.max": "300000 100000\n"}, 3),
        ({"sys/fs/cgroup/job/step/cpu.max": "5000 100000\n"}, 1),
        ({"sys/fs/cgroup/job/step/cpu.max": "1600000 100000\n"}, 8),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/job\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
    ],
)
def test_a_cgroup_quota_limits_the_cores(files: dict[str, str], cores: int, tmp_path: Path) -> None:
    cpu = detect_cpu(machine(tmp_path, files))
    assert cpu.num_cores == cores
    assert ("quota" in cpu.cores_reason) == (cores < 8)


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        (
            {
                "sys/fs/cgroup/job/memory.max": f"{2 * GB}\n",
                "sys/fs/cgroup/job/memory.current": f"{GB}\n",
                "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {GB // 2}\n",
            },
            2 * GB,
            GB + GB // 2,
        ),
        ({"sys/fs/cgroup/job/memory.max": "max\n", "sys/fs/cgroup/job/memory.current": "1\n"}, 8 * GB, 4 * GB),
        (
            {
                "proc/self/cgroup": "4:memory:/gone\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GB}\n",
            },
            GB,
            0,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
            },
            8 * GB,
            4 * GB,
        ),
    ],
)
def test_a_cgroup_limit_limits_the_memory(files: dict[str, str], total: int, available: int, tmp_path: Path) -> None:
    cpu = detect_cpu(machine(tmp_path, files))
    assert (cpu.memory_total_bytes, cpu.memory_available_bytes) == (total, available)


@pytest.mark.parametrize(
    ("line", "flag"),
    [("flags : avx2", None), ("flags : avx512_bf16 amx_bf16", "amx_bf16"), ("Features : asimd bf16", "bf16")],
)
def test_bfloat16_support_is_read_from_the_flags(line: str, flag: str | None, tmp_path: Path) -> None:
    assert detect_cpu(machine(tmp_path, {"proc/cpuinfo": f"model name : X\n{line}\n"})).bf16_flag == flag


# --- cuda -------------------------------------------------------------------------------------------------------------

DRIVER = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 1\n",
    "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: X\n",
    "proc/driver/nvidia/gpus/0000:02:00.0/information": "Model: X\n",
}


def test_no_driver_and_no_gpu_is_an_answer_not_a_crash(tmp_path: Path) -> None:
    cuda = detect_cuda({}, tmp_path)
    assert cuda.driver is None
    assert cuda.problems == ()
    assert cuda.gpus or cuda.reason


def test_gpus_that_a_cpu_build_of_torch_cannot_use_are_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    cuda = detect_cuda({}, machine(tmp_path, DRIVER))
    assert cuda.driver == "570.86.15"
    ((wrong, way_out),) = cuda.problems
    assert "2 NVIDIA GPU(s) are here" in wrong
    assert "CUDA build" in way_out


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27\n", "470.82.01"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n", "580.159.04"),
        ("NVRM version: something else\n", "unknown"),
    ],
)
def test_the_driver_version_is_read_from_either_kind_of_module(line: str, version: str, tmp_path: Path) -> None:
    assert detect_cuda({}, machine(tmp_path, {"proc/driver/nvidia/version": line})).driver == version


@pytest.mark.parametrize(
    ("visible", "fragment"),
    [("0,0", "twice"), ("0,2", "names GPU 2, but there are 2"), ("-1,0", "hides itself")],
)
def test_a_contradictory_visibility_variable_is_a_problem(
    visible: str, fragment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    cuda = detect_cuda({"CUDA_VISIBLE_DEVICES": visible}, machine(tmp_path, DRIVER))
    assert any(fragment in wrong for wrong, _ in cuda.problems)


@pytest.mark.parametrize("visible", [None, "0", "1,0", "GPU-1234"])
def test_a_sound_visibility_variable_is_none(
    visible: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert detect_cuda(environment, machine(tmp_path, DRIVER)).problems == ()


def test_hidden_gpus_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    cuda = detect_cuda({"CUDA_VISIBLE_DEVICES": ""}, machine(tmp_path, DRIVER))
    assert cuda.reason == "CUDA_VISIBLE_DEVICES hides all GPUs"


# --- choices ----------------------------------------------------------------------------------------------------------


def test_auto_takes_a_gpu_where_there_is_one_and_gives_the_reason() -> None:
    on_cpu, on_gpu = (
        by_setting(choose(p, None, {})) for p in (PROFILE, replace(PROFILE, cuda=Cuda((GPU,), "1", "5", "12")))
    )
    assert (on_cpu["device"].value, on_cpu["device"].reason) == ("cpu", "no NVIDIA driver is loaded")
    assert (on_gpu["device"].value, on_gpu["device"].reason) == ("cuda", "Some GPU is usable")


def test_a_configured_device_that_is_not_here_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"no CUDA device: no NVIDIA driver[\s\S]*way out"):
        choose(PROFILE, run_config(device="cuda"), {})


def test_a_run_that_names_the_cpu_as_its_hardware_is_on_the_cpu_where_a_gpu_is() -> None:
    with_gpu = replace(PROFILE, cuda=Cuda((GPU,), "1", "5", "12"))
    named = run_config(cluster=ClusterConfig(hardware="cpu"))
    device = by_setting(choose(with_gpu, named, {}))["device"]
    assert (device.value, device.reason) == ("cpu", "cluster.hardware is cpu")
    assert by_setting(choose(with_gpu, run_config(), {}))["device"].value == "cuda"


@pytest.mark.parametrize(
    ("configured", "environment", "value", "fragment"),
    [
        (None, {}, 8, "affinity"),
        (None, {"OMP_NUM_THREADS": "2"}, 2, "OMP_NUM_THREADS=2"),
        (None, {"OMP_NUM_THREADS": "99"}, 8, "affinity"),
        (3, {"OMP_NUM_THREADS": "2"}, 3, "as configured"),
        (16, {}, 16, "more than the 8 cores"),
    ],
)
def test_threads_follow_the_configuration_then_the_environment_then_the_cores(
    configured: int | None, environment: dict[str, str], value: int, fragment: str
) -> None:
    threads = by_setting(choose(PROFILE, run_config(threads=configured), environment))["threads"]
    assert threads.value == value
    assert fragment in threads.reason


def test_bfloat16_without_instructions_is_said_to_be_slow() -> None:
    old = replace(PROFILE, cpu=replace(CPU, bf16_flag=None))
    slow, fast = (by_setting(choose(p, run_config(), {}))["trainer.dtype"] for p in (old, PROFILE))
    assert slow.slow
    assert "slow" in slow.reason
    assert not fast.slow
    assert fast.reason == "avx512_bf16 present"


# --- this machine -----------------------------------------------------------------------------------------------------


def test_this_machine_is_described_within_its_own_bounds(tmp_path: Path) -> None:
    profile = detect(tmp_path)
    assert 1 <= profile.cpu.num_cores <= (os.cpu_count() or 1)
    assert 0 < profile.cpu.memory_available_bytes <= profile.cpu.memory_total_bytes
    assert profile.versions["torch"]
    assert profile.disk_free_bytes > 0


def test_missing_and_old_dependencies_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.hardware import profile as module

    monkeypatch.setattr(
        module.metadata, "requires", lambda _: ["no-such-thing>=2", "torch>=99", 'absent; extra == "dev"', "numpy"]
    )
    problems = missing_dependencies()
    assert [wrong.split()[0] for wrong, _ in problems] == ["no-such-thing", "torch"]
    assert problems[0] == ("no-such-thing is missing", 'pip install "no-such-thing>=2"')


def test_the_doctor_says_what_is_chosen_and_ends_with_a_verdict() -> None:
    result = examine()
    text = render(result)
    assert {c["setting"] for c in result["choices"]} == {"device", "threads", "trainer.dtype", "rollout.dtype"}
    assert all(c["reason"] in text for c in result["choices"])
    broken = result | {"problems": [{"wrong": "torch is missing", "way_out": "pip install torch"}]}
    assert "has everything here that it needs itself" in render(result | {"problems": []})
    assert "way out: pip install torch" in render(broken)
    assert render(broken).endswith("something needed is missing")


LAUNCHER = """
import subprocess, sys
memory = b"x" * (600 << 20)
child = "from lockstep.hardware.cpu import peak_rss_bytes; large = b'x' * (100 << 20); print(peak_rss_bytes())"
print(subprocess.run([sys.executable, "-c", child], check=True, capture_output=True, text=True).stdout)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system keeps no such count")
def test_peak_memory_is_that_of_this_program_and_not_of_the_launcher_that_started_it() -> None:
    done = subprocess.run([sys.executable, "-c", LAUNCHER], check=True, capture_output=True, text=True)
    assert 100 << 20 < int(done.stdout) < 400 << 20
