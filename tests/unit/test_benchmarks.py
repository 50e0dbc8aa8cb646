"""Benchmarks import without their extra, read their arguments and refuse unequal work. Nothing is timed here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import end_to_end, memory_vllm_gpu, quickstart_seeds
from benchmarks.stepwise import BenchmarkError, Side
from benchmarks.workload import Workload

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_imports_without_its_extra(name: str) -> None:
    code = f"import sys; sys.modules['trl'] = sys.modules['datasets'] = None; import benchmarks.{name}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("name", ["end_to_end", "start", "quickstart_seeds", "machine", "generation"])
def test_a_benchmark_explains_its_arguments(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "usage:" in output


def test_too_few_steps_to_show_learning_are_refused() -> None:
    command = [sys.executable, "-m", "benchmarks.end_to_end", "--steps", "5"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert "at least 6" in result.stderr


def step(number: int, **changes: Any) -> dict[str, Any]:
    row = {
        "problem_ids": ["a", "b"],
        "prompt_tokens": [5, 5, 6, 6],
        "completion_tokens": [3, 3, 3, 3],
        "num_updates": number,
    }
    return row | changes


def work(lengths: Any = "uniform") -> Workload:
    return Workload(lengths, num_steps=2, num_prompts=2, group_size=2)


def test_equal_work_passes() -> None:
    rows = [step(1), step(2)]
    end_to_end.check_same_work(work(), rows, rows)


def test_ragged_lengths_may_differ_between_the_sides() -> None:
    end_to_end.check_same_work(work("ragged"), [step(1)], [step(1, completion_tokens=[1, 3, 3, 3])])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"problem_ids": ["a", "c"]}, "prompts"),
        ({"prompt_tokens": [5, 5, 7, 7]}, "prompt tokens"),
        ({"completion_tokens": [3, 3, 3]}, "completions"),
        ({"completion_tokens": [3, 3, 3, 2]}, "completion tokens"),
        ({"num_updates": 2}, "updates"),
    ],
)
def test_unequal_work_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(BenchmarkError, match=f"step 1: {named} differ"):
        end_to_end.check_same_work(work(), [step(1)], [step(1, **change)])


def test_equal_but_too_little_work_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="expected"):
        end_to_end.check_same_work(work(), [step(0)], [step(0)])


def test_the_workload_changes_only_what_it_says() -> None:
    config = Workload("ragged", num_steps=7, max_new_tokens=24).resolved().config
    assert (config.steps, config.rollout.max_new_tokens, config.trainer.schedule) == (8, 24, "constant")
    assert config.eval.every == 0
    assert config.checkpoint.every > 7


def test_a_side_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        Side("ours", command, tmp_path / "log", threads=1) as side,
        pytest.raises(BenchmarkError, match="no such model"),
    ):
        side.read()


def test_a_side_steps_when_told_and_keeps_its_rows_apart_from_prints(tmp_path: Path) -> None:
    code = (
        "from benchmarks.stepwise import StepGate\n"
        "gate = StepGate()\n"
        "print('noise')\n"
        "gate.wait(settings={})\n"
        "for n in range(9): gate.finish(n=n)\n"
    )
    with Side("ours", [sys.executable, "-c", code], tmp_path / "log", threads=1) as side:
        assert side.read() == {"settings": {}}
        rows = [side.step(), side.step()]
    assert [row["n"] for row in rows] == [0, 1]
    assert all(row["seconds"] > 0 and row["peak_rss_bytes"] > 0 for row in rows)
    assert "noise" in (tmp_path / "log").read_text()


def test_an_outcome_keeps_correct_and_form_apart_and_takes_the_largest_agreement() -> None:
    steps = [
        {
            "step": n,
            "reward/mean": float(n),
            "verdict/status": "pass",
            "time/step_s": 1.0,
            **dict.fromkeys(quickstart_seeds.PEAK_OF, 0.01 * n),
        }
        for n in range(1, 21)
    ]
    before = {"step": 0, "eval/accuracy": 0.25, "eval/format": 0.1, "eval/truncated": 0.9}
    steps[-1] |= {"eval/accuracy": 0.75, "eval/format": 0.9, "eval/truncated": 0.0}
    found = quickstart_seeds.outcome([before, *steps])
    assert found["heldout_before"] == {"correct": 0.25, "form": 0.1, "truncated": 0.9}
    assert found["heldout_after"] == {"correct": 0.75, "form": 0.9, "truncated": 0.0}
    assert (found["reward_first_steps"], found["reward_last_steps"]) == (5.5, 15.5)
    assert found["agreement_peak"]["agreement/k3"] == pytest.approx(0.2)
    assert json.dumps(found)


def test_an_outcome_without_two_evaluations_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        quickstart_seeds.outcome([{"step": 0, "eval/accuracy": 0.5}])


def test_figures_of_a_start_are_in_the_file_as_soon_as_they_are_known(tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    first = memory_vllm_gpu.Report(out)
    first.put("a bytes", set="held out", weights=memory_vllm_gpu.judged(1000, 1099))
    assert json.loads(out.read_text("utf-8"))["starts"]["a bytes"]["weights"]["within"]
    # Another process goes on with the same file.
    memory_vllm_gpu.Report(out).put("a bytes", start=memory_vllm_gpu.judged(1000, 1101))
    memory_vllm_gpu.Report(out).put("b bytes", set="fitted", start=memory_vllm_gpu.judged(1000, 2000))
    whole = memory_vllm_gpu.Report(out).read()
    assert whole["starts"]["a bytes"]["weights"] == {"measured": 1000, "planned": 1099, "ratio": 1.099, "within": True}
    assert memory_vllm_gpu.outside(whole) == {"a bytes: start": 1.101}, "fitted ones are not judged"


def test_the_plan_of_a_start_is_a_cache_in_bytes_or_a_fraction_of_the_card() -> None:
    given, left = (memory_vllm_gpu.planned_items("qwen3-0_6b", mode, "cuda") for mode in memory_vllm_gpu.MODES)
    assert given["key/value cache"] == memory_vllm_gpu.CACHE_BYTES
    assert given["weights"] == left["weights"] == 2 * 596_049_920
    assert sum(left.values()) == math.ceil(143_771 * 2**20 * memory_vllm_gpu.FRACTION)
