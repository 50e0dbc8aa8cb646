"""Memory that was given back is free by the device's own count, not by the word of who gave it (I5)."""

from __future__ import annotations

import mmap
import os
import re
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.hardware.freed_memory import amd_used_bytes, not_freed, nvidia_used_bytes

SIZE = 128 << 20


def resident() -> int:
    """The system's count of this process's memory: the device tool of a CPU."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Sleeper:
    """An engine's memory: real pages, which ``sleep`` gives back or only says that it did."""

    def __init__(self) -> None:
        self.pages = mmap.mmap(-1, SIZE)
        for offset in range(0, SIZE, mmap.PAGESIZE):
            self.pages[offset] = 1
        self.reported_free = False

    def sleep(self) -> None:
        """The pages go; the range of addresses stays reserved, as a captured graph needs it."""
        self.pages.madvise(mmap.MADV_DONTNEED)
        self.reported_free = True

    def sleep_by_word_alone(self) -> None:
        """As ROCm did: freed by the runtime's books, and every page still there."""
        self.reported_free = True


def test_pages_that_are_given_back_are_free() -> None:
    engine = Sleeper()
    before = resident()
    assert not_freed(engine.sleep, SIZE, resident) is None
    assert before - resident() > 0.9 * SIZE


def test_memory_that_is_reported_free_and_stays_in_use_is_told_with_both_numbers() -> None:
    engine = Sleeper()
    problem = not_freed(engine.sleep_by_word_alone, SIZE, resident)
    assert engine.reported_free
    assert problem is not None
    assert re.match(r"0\.13 GB were to be given back, and the device's own count fell by -?0\.0\d GB", problem)


def test_where_nothing_counts_nothing_is_claimed() -> None:
    ran: list[int] = []
    assert not_freed(lambda: ran.append(1), SIZE, lambda: None) is None
    assert ran == [1]


def test_amdgpu_counts_in_a_file_of_the_device(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:c1:00.0"
    folder.mkdir(parents=True)
    (folder / "mem_info_vram_used").write_text("206000000000\n")
    device = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    assert amd_used_bytes(device, tmp_path) == 206_000_000_000
    assert amd_used_bytes(SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC2, pci_device_id=0), tmp_path) is None
    assert amd_used_bytes(SimpleNamespace(), tmp_path) is None


@pytest.mark.parametrize(("says", "bytes_used"), [("143771", 143771 << 20), ("[N/A]", None)])
def test_nvidia_smi_counts_the_device_of_that_uuid(
    says: str, bytes_used: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\n[ "$4" = GPU-1234 ] && echo "{says}"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert nvidia_used_bytes("1234") == bytes_used
    assert nvidia_used_bytes("GPU-9") is None
