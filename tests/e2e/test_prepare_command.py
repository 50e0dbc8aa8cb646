"""``lockstep prepare`` as a user runs it: every family, killed at any moment, twice at a time, in little memory."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.inspect import inspect
from lockstep.checkpoint.prepare import LOCK, Preparation
from lockstep.checkpoint.progress import Silent
from lockstep.checkpoint.work_list import WORK_LIST, WorkList
from lockstep.checkpoint.writer import MIN_BUDGET_BYTES
from lockstep.config.prepare_schema import PrepareConfig
from tests.e2e.conftest import command
from tests.synthetic_checkpoints import write_checkpoint

RECIPE = """
extends = "tiny-qwen3-moe"
name = "prepared"
[prepare]
source = "{source}"
target = "{target}"
keep_layers = {layers}
quantisation = "{scheme}"
shard_ranks = 2
file_bytes = 200000
"""
FAMILIES = [
    ("deepseek_v4_flash", 4, "mxfp4_experts", "pruned"),  # served as it is published
    ("deepseek_v4_flash", 4, "fp8", "quantised"),
    ("deepseek_v4_fp8", 4, "fp8_ue8m0", "quantised"),
    ("glm_moe_dsa", 5, "fp8", "quantised"),
    ("glm_moe_dsa_fp8", 5, "fp8", "pruned"),
    ("inkling", 4, "none", "pruned"),
    ("qwen3_moe", 5, "mxfp4_experts", "quantised"),
    ("llama_tied", 2, "fp8", "quantised"),
]


def recipe(tmp_path: Path, family: str, layers: int, scheme: str) -> Path:
    source = write_checkpoint(tmp_path / "source", family)
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE.format(source=source, target=tmp_path / "t", layers=layers, scheme=scheme))
    return file


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command("prepare", *arguments), capture_output=True, text=True, check=False, timeout=300, env=env, **options
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Files by path, but for the lock, which names the last process."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != LOCK]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layers", "scheme", "engine"), FAMILIES)
def test_every_familys_stages_run_from_a_recipe_file(
    family: str, layers: int, scheme: str, engine: str, tmp_path: Path
) -> None:
    file = recipe(tmp_path, family, layers, scheme)
    done = run(str(file), "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "quiet where no terminal is"
    result = json.loads(done.stdout)
    assert [one["stage"] for one in result["stages"]] == [
        "fetch", "validate", "prune", "dequantise", "quantise", "shard"
    ]  # fmt: skip
    assert Path(result["engine"]).name == engine
    trainer = inspect(Path(result["trainer"]))
    assert trainer.ok, trainer.text()
    assert (trainer.quantisation, trainer.facts["num_layers"]) == ("none", layers)
    report = inspect(Path(result["engine"]))
    assert report.ok, report.text()
    assert report.quantisation == scheme
    assert len(list(Path(result["shards"]).glob("*.distcp"))) == 2
    before = contents(tmp_path / "t")
    assert run(str(file), "--stage", "shard", "--stage", "quantise").returncode == 0
    assert contents(tmp_path / "t") == before


@pytest.mark.slow
def test_bad_usage_and_refusals_say_what_would_be_right(tmp_path: Path) -> None:
    missing = run("tiny-qwen3-moe")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "prepare.source" in missing.stderr
    file = recipe(tmp_path, "inkling", 4, "fp8")
    refused = run(str(file))
    assert refused.returncode == 1
    assert "inkling_text has no quantised form" in refused.stderr
    assert "Traceback" not in refused.stderr
    both = run(str(file), "--set", "rollout.quantisation=fp8", "--set", 'prepare.high_precision=["a"]')
    assert both.returncode == 2
    dry = run(str(file), "--set", "prepare.quantisation=none", "--target", str(tmp_path / "dry"), "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "planned" in dry.stdout
    assert not (tmp_path / "dry").exists()


# --- kills ------------------------------------------------------------------------------------------------------------

SETTINGS = PrepareConfig(keep_layers=4, quantisation="fp8", shard_ranks=3, file_bytes=150_000)
CALLS = ("pwrite", "fsync", "rename", "replace", "posix_fallocate", "unlink")


def prepare(source: Path, target: Path) -> None:
    Preparation(SETTINGS, str(source), target, Silent()).run()


def killed_at(number: int, source: Path, target: Path) -> bool:
    """Prepare in a process that is killed at its ``number``-th write, in the middle of it. False if it came through."""
    child = os.fork()
    if child == 0:
        left = [number]

        def armed(real: Any, half: bool) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    if half:
                        real(arguments[0], memoryview(arguments[1])[: len(arguments[1]) // 2], arguments[2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)

            return call

        try:
            for name in CALLS:
                setattr(os, name, armed(getattr(os, name), name == "pwrite"))
            prepare(source, target)
        except BaseException:  # the child must not return into the test
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "an error, where a kill was meant"
    return os.WIFSIGNALED(status)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A quantised source, and what an undisturbed preparation makes of it."""
    folder = tmp_path_factory.mktemp("straight")
    source = write_checkpoint(folder / "source", "deepseek_v4_flash")
    prepare(source, folder / "t")
    return source, contents(folder / "t")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_kills_in_the_middle_of_writes_cost_no_more_than_the_file(
    seed: int, straight: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    source, wanted = straight
    dice, kills = random.Random(seed), 0
    target = tmp_path / "t"
    while killed_at(dice.randint(1, 60), source, target):
        kills += 1
        if (target / WORK_LIST).exists():
            for stage, folder in (("prune", "pruned"), ("dequantise", "plain"), ("quantise", "quantised")):
                for name, file in WorkList(target).done(stage).items():
                    assert (target / folder / name).stat().st_size == file.bytes
        if kills >= 25:
            break
    assert kills >= 5
    prepare(source, target)
    assert contents(target) == wanted


@pytest.mark.slow
def test_a_kill_at_each_of_the_first_and_last_writes_is_survived(
    straight: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    source, wanted = straight
    for number in [*range(1, 12), *range(40, 400, 23)]:
        target = tmp_path / str(number)
        killed_at(number, source, target)
        prepare(source, target)
        assert contents(target) == wanted, number


@pytest.mark.slow
def test_a_command_that_is_killed_from_outside_goes_on(tmp_path: Path) -> None:
    file = recipe(tmp_path, "deepseek_v4_flash", 4, "fp8")
    arguments = command("prepare", str(file), "--set", "prepare.file_bytes=20000")
    delays = random.Random(0)
    for _ in range(4):
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        deadline = time.monotonic() + 60
        while not (tmp_path / "t" / WORK_LIST).exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delays.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert run(str(file), "--set", "prepare.file_bytes=20000").returncode == 0
    assert run(str(file), "--set", "prepare.file_bytes=20000", "--target", str(tmp_path / "u")).returncode == 0
    for name in ("pruned", "plain", "quantised", "shards"):
        assert contents(tmp_path / "t" / name) == contents(tmp_path / "u" / name)


@pytest.mark.slow
def test_two_commands_on_one_target_do_not_corrupt_it(tmp_path: Path) -> None:
    file = recipe(tmp_path, "qwen3_moe", 4, "fp8")
    processes = [
        subprocess.Popen(command("prepare", str(file)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [(*process.communicate(timeout=300), process.returncode) for process in processes]
    assert 0 in [code for *_, code in results]
    for _, err, code in results:
        assert code == 0 or (code == 1 and "is being prepared by another process (pid" in err), err
    assert run(str(file), "--target", str(tmp_path / "u")).returncode == 0
    for name in ("pruned", "quantised", "shards"):
        assert contents(tmp_path / "t" / name) == contents(tmp_path / "u" / name)


# --- memory -----------------------------------------------------------------------------------------------------------

_MEASURED = """
import sys
from pathlib import Path
from lockstep.checkpoint.prepare import Preparation
from lockstep.checkpoint.progress import Silent
from lockstep.config.prepare_schema import PrepareConfig
import lockstep.checkpoint.shard, torch
def peak():
    # Not ru_maxrss: a process inherits it from the one that started it.
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
torch.ones(4).bfloat16().float()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = peak()
Preparation(PrepareConfig(quantisation="fp8", shard_ranks=2, file_bytes=1 << 29), sys.argv[1], Path(sys.argv[2]),
            Silent()).run()
print(peak() - before)
"""


def write_large(folder: Path, num_layers: int) -> int:
    """A Llama of some 0.36 GB a layer, written one tensor at a time. Returns the bytes of its largest tensor."""
    from safetensors.torch import save_file

    hidden, inner, vocab = 4096, 11_008, 32_000
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": num_layers, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
        "vocab_size": vocab, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden), "model.norm": (hidden,)}
    for layer in range(num_layers):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{p}_proj": (hidden, hidden) for p in "qkvo"}
        shapes |= {f"{at}mlp.{p}_proj": (inner, hidden) for p in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj": (hidden, inner)}
        shapes |= {f"{at}{p}_layernorm": (hidden,) for p in ("input", "post_attention")}
    weight_map: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    for number, (name, shape) in enumerate(shapes.items()):
        tensor = (torch.rand(shape, generator=generator, dtype=torch.bfloat16) - 0.5).contiguous()
        save_file({f"{name}.weight": tensor}, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
        weight_map[f"{name}.weight"] = f"model-{number:05d}.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return 2 * vocab * hidden


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [1, 5])  # 0.9 and 2.5 GB, in two and in five files that two workers write
def test_memory_stays_within_its_budget_whatever_the_checkpoints_size(
    tmp_path: Path, record_property: Any, num_layers: int
) -> None:
    largest = write_large(tmp_path / "source", num_layers)
    arguments = [sys.executable, "-c", _MEASURED, str(tmp_path / "source"), str(tmp_path / "t")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=580, env=env)
    peak = int(done.stdout)
    record_property("peak above the start", peak)
    assert peak > 50 << 20, "a matrix of 90 MB was read: the measure must see it"
    budget = max(MIN_BUDGET_BYTES, largest)  # a half of the largest, and its copy
    assert peak < budget + (96 << 20), f"{peak / 1e6:.0f} MB, with a budget of {budget / 1e6:.0f} MB"
