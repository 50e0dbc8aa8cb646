"""A run that the gate stopped can be scored again, exactly, and its cause found, from its folder alone."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.agreement import Agreement, measure
from lockstep.cli import app, main
from lockstep.config.errors import ConfigError
from lockstep.demo import layer_dropped
from lockstep.driver.evidence import Evidence, ReplayError, from_run
from lockstep.driver.parity_commands import attribute_evidence
from lockstep.loop import train
from lockstep.metrics.run_folder import rollout_steps
from lockstep.metrics.sinks import read_jsonl
from lockstep.parity.gate import Gate
from lockstep.recipes import load_recipe
from lockstep.rollout.torch_engine import TorchEngine
from tests.e2e.conftest import SMALL

LAYER = "model.layers.1"
SETTINGS = [*SMALL, "checkpoint.keep=9", "refit.verify_every=1000", "trainer.learning_rate=0.01"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few seconds whose refits drop a layer from the third on; checkpoints would be due at even steps."""
    run_dir = tmp_path_factory.mktemp("runs") / "stopped"
    with layer_dropped(LAYER, after=4):  # other weights at the start, the policy's, and two steps
        assert train(load_recipe("tiny-qwen3-moe", SETTINGS), run_dir) == 1
    return run_dir


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        app(list(arguments), standalone_mode=True)
    code = done.value.code
    assert isinstance(code, int)
    return code, capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out = command(capsys, *arguments, "--json")
    return code, json.loads(out)


def last_step(run_dir: Path) -> int:
    return rollout_steps(run_dir)[-1]


def test_the_weights_of_the_version_that_sampled_are_kept_at_a_stop(stopped: Path) -> None:
    evidence = from_run(stopped)
    assert evidence.exact
    assert evidence.step == last_step(stopped)
    versions = {int(v) for s in evidence.bench.sequences for v in s.versions[s.loss_mask]}
    assert versions == {evidence.bench.version}
    assert evidence.bench.served
    assert all(name.startswith(f"{LAYER}.") for name in evidence.bench.served)


def test_replay_reproduces_what_trainer_and_engine_recorded(stopped: Path) -> None:
    bench = from_run(stopped).bench
    trained = bench.trainer_scores(bench.setting)
    engine = bench.engine_scores(bench.setting)[0]
    for one in bench.recorded:
        mask = one.sequence.loss_mask
        assert one.train_logprobs is not None
        np.testing.assert_allclose(
            trained[one.sequence.sequence_id].logprobs[mask], one.train_logprobs[mask], atol=2e-5
        )
        np.testing.assert_allclose(
            engine[one.sequence.sequence_id].logprobs[mask], one.sequence.logprobs[mask], atol=2e-5
        )


@pytest.mark.parametrize(
    ("options", "near", "what"),
    [
        ([], "replayed/recorded engine", "engine in float32 by decode"),
        (["--path", "prefill"], "replayed/recorded engine", "engine in float32 by prefill"),
        (["--engine", "trainer", "--device", "cpu"], "recorded trainer/replayed", "trainer in float32"),
    ],
)
def test_the_command_replays_on_either_side(
    stopped: Path, options: list[str], near: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = as_json(capsys, "parity", "replay", str(stopped), str(last_step(stopped)), *options)
    assert code == 0
    assert told["exact"] is True
    assert told["replayed"].startswith(what)
    assert told["pairs"][near]["abs_diff/mean"] < 1e-5
    assert told["pairs"]["recorded trainer/recorded engine"]["abs_diff/mean"] > 1e-4


def test_sequences_that_the_runs_trainer_never_scored_are_left_out_and_not_called_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In bypass with two optimizer steps the gate stops a run whose trainer has seen half of the batch."""
    bypass = ["algorithm.corrections.bypass=true", "algorithm.optimizer_steps_per_batch=2"]
    run_dir = tmp_path / "run"
    with layer_dropped(LAYER, after=4):
        assert train(load_recipe("tiny-qwen3-moe", [*SETTINGS, *bypass]), run_dir) == 1
    bench = from_run(run_dir).bench
    assert {one.train_logprobs is None for one in bench.recorded} == {True, False}
    recorded = bench.as_recorded()
    assert recorded is not None
    assert recorded.num_nonfinite == 0
    _, told = as_json(capsys, "parity", "replay", str(run_dir), str(last_step(run_dir)))
    ours, whole = (told["pairs"][name] for name in ("recorded trainer/recorded engine", "replayed/recorded engine"))
    assert ours["nonfinite"] == 0
    assert 0 < ours["tokens"] < whole["tokens"]
    code, found = as_json(capsys, "parity", "attribute", str(run_dir), "--factor", "prefill", "--factor", "load")
    assert (code, found["minimal"]) == (0, [["load"]])


def test_another_dtype_is_as_far_off_as_that_dtype(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = str(last_step(stopped))
    _, told = as_json(capsys, "parity", "replay", str(stopped), step, "--dtype", "bfloat16")
    assert 1e-4 < told["pairs"]["replayed/recorded engine"]["abs_diff/mean"] < 0.5


def test_the_cause_is_found_from_the_folder_alone(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = as_json(capsys, "parity", "attribute", str(stopped))
    assert code == 0
    assert found["status"] == "explained"
    assert found["minimal"] == [["load"]]
    assert found["refined"] == {"load": [f"load:{LAYER}"]}
    assert len(found["trials"]) <= found["budget"]
    code, out = command(capsys, "parity", "attribute", str(stopped), "--factor", "buffers", "--factor", "NOTHING=1")
    assert code == 1
    assert "unexplained" in out
    assert "inside the noise" in out


def test_measure_shows_the_refit_as_the_link_that_breaks(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = as_json(capsys, "parity", "measure", str(stopped))
    assert code == 1
    broken = [pair["pair"] for pair in told["pairs"] if not pair["holds"]]
    assert broken == ["prefill/loaded", "sampled/trained"]
    code, out = command(capsys, "parity", "measure", str(stopped), "--step", "3")
    assert "prefill/loaded" in out
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["attribute", "RUN", "--full"], 2, "all subsets of"),
        (["attribute", "RUN", "--factor", "prefill", "--factor", "prefill"], 2, "two factors share a name: prefill"),
        pytest.param(
            ["replay", "RUN", "1", "--device", "cuda"], 1, "there is no GPU to score on",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)  # fmt: skip
def test_what_cant_be_done_is_told_without_a_traceback(
    stopped: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    given = [str(stopped) if argument == "RUN" else argument for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["lockstep", "parity", *given])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == code
    assert message in capsys.readouterr().err


def test_a_replay_needs_no_bound_for_its_device(stopped: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(stopped, run_dir)
    config = run_dir / "config.toml"
    text = config.read_text(encoding="utf-8")
    elsewhere = 'bounds = [{ bound = 1e-4, hardware = "cuda", evidence = "of another machine" }]'
    config.write_text(re.sub("^bounds = .*$", elsewhere, text, flags=re.MULTILINE), "utf-8")
    with pytest.raises(ConfigError, match="has no bound for cpu"):
        from_run(run_dir)
    assert from_run(run_dir, judged=False).bounds == ()


def test_the_metric_that_is_searched_is_the_one_that_the_verdict_names(stopped: Path) -> None:
    evidence = from_run(stopped)
    some = evidence.bounds[0]
    bounds = tuple(
        some.model_copy(update={"metric": metric, "bound": bound})
        for metric, bound in (("abs_diff/mean", 1e-3), ("abs_diff/max", 1e-3), ("k3", 10.0))
    )
    verdict = Gate(evidence.config.gate, bounds).judge(measure_recorded(evidence), evidence.step)
    result, _ = attribute_evidence(replace(evidence, bounds=bounds), ("load",))
    assert result.metric == verdict.metric == "abs_diff/max"


def test_a_drift_is_searched_against_the_limit_that_it_exceeded(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The value is within its bound, so that there seemed to be nothing to explain."""
    run_dir = tmp_path / "run"
    shutil.copytree(stopped, run_dir)
    config, metrics = run_dir / "config.toml", run_dir / "metrics.jsonl"
    wide = 'bounds = [{ bound = 10.0, evidence = "wide" }]'
    text = re.sub("^bounds = .*$", wide, config.read_text(encoding="utf-8"), flags=re.MULTILINE)
    config.write_text(re.sub("^baseline_steps = .*$", "baseline_steps = 2", text, flags=re.MULTILINE), "utf-8")
    metrics.write_text(metrics.read_text(encoding="utf-8").replace('"abs_diff/p50"', '"abs_diff/mean"'), "utf-8")
    first = [float(str(row["agreement/abs_diff/mean"])) for row in read_jsonl(metrics)[1:3]]
    assert [bound.bound for bound in from_run(run_dir).bounds] == [4.0 * sum(first) / 2]
    code, found = as_json(capsys, "parity", "attribute", str(run_dir), "--factor", "prefill", "--factor", "load")
    assert (code, found["minimal"]) == (0, [["load"]])
    assert [bound.bound for bound in from_run(run_dir, 1).bounds] == [10.0]


def measure_recorded(evidence: Evidence) -> Agreement:
    fresh = evidence.bench.fresh
    return measure(
        [one.train_logprobs for one in evidence.bench.recorded],  # pyright: ignore[reportArgumentType]
        [sequence.logprobs for sequence in fresh],
        [sequence.loss_mask for sequence in fresh],
    )


def test_a_version_without_a_checkpoint_is_said_to_be_one(stopped: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(stopped, run_dir)
    checkpoints = sorted((run_dir / "checkpoints").iterdir())
    shutil.rmtree(checkpoints[-1])
    assert len(checkpoints) > 1
    evidence = from_run(run_dir)
    assert not evidence.exact
    assert "which has no checkpoint" in evidence.note
    for path in checkpoints[:-1]:
        shutil.rmtree(path)
    with pytest.raises(ReplayError, match=r"no complete checkpoint before step.*; there: none .*step 1, whose"):
        from_run(run_dir)
    later = last_step(run_dir) + 5
    shutil.copytree(stopped / "checkpoints" / checkpoints[-1].name, run_dir / f"checkpoints/step-{later:06d}")
    with pytest.raises(ReplayError, match=f"there: step {later} .checkpoint.every"):
        from_run(run_dir)
    with pytest.raises(ReplayError, match="no recorded batch of step 99; recorded are 1 to"):
        from_run(run_dir, 99)
    first = from_run(run_dir, 1)
    assert first.exact
    scores = first.bench.trainer_scores(first.bench.setting)
    for one in first.bench.recorded:
        mask = one.sequence.loss_mask
        assert one.train_logprobs is not None
        np.testing.assert_allclose(scores[one.sequence.sequence_id].logprobs[mask], one.train_logprobs[mask], atol=2e-5)


def test_a_batch_of_vllm_is_not_blamed_on_scheduling_by_an_engine_that_did_not_sample_it(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(stopped, run_dir)
    shutil.rmtree(run_dir / "engine")  # scored again, the batch is healthy: what it recorded came from elsewhere
    settings = (run_dir / "config.toml").read_text()
    (run_dir / "config.toml").write_text(settings.replace('engine = "torch"', 'engine = "vllm"'))
    _, told = as_json(capsys, "parity", "measure", str(run_dir))
    assert "sampled by vllm, scored again by the embedded engine" in told["note"]
    assert "kernels" in told["pairs"][0]["isolates"]
    code, found = as_json(capsys, "parity", "attribute", str(run_dir), "--factor", "prefill", "--factor", "load")
    assert code == 1
    assert "sampled by vllm, scored again by the embedded engine" in found["note"]
    assert "is not rebuilt here: the kernels of vllm" in found["sentence"]
    _, replayed = as_json(capsys, "parity", "replay", str(run_dir), str(last_step(run_dir)))
    assert replayed["replayed"].startswith("embedded engine in float32")


def test_engine_tensors_of_another_batch_are_not_taken(stopped: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(stopped, run_dir)
    step = last_step(run_dir)
    shutil.copy(run_dir / f"rollouts/step-{step - 1:06d}.parquet", run_dir / f"rollouts/step-{step:06d}.parquet")
    assert from_run(run_dir, step).bench.served == {}


def test_a_stopped_run_resumes_at_the_step_that_was_refused(stopped: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(stopped, run_dir)
    step = last_step(run_dir)
    assert train(load_recipe("tiny-qwen3-moe", SETTINGS), run_dir) == 0
    assert last_step(run_dir) == 6 > step
    assert from_run(run_dir, step).bench.served == {}, "the healthy engine of the resumed run served the trainer's"


def test_a_recipe_is_measured_and_found_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    settings = [argument for setting in SMALL for argument in ("--set", setting)]
    code, told = as_json(capsys, "parity", "measure", "tiny-qwen3-moe", *settings)
    assert code == 0
    assert all(pair["holds"] for pair in told["pairs"])
    code, out = command(capsys, "parity", "attribute", "tiny-qwen3-moe", *settings)
    assert code == 0
    assert "nothing to explain" in out


def test_a_recipe_whose_refit_forgets_a_layer_is_seen_without_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    settings = [argument for setting in SMALL for argument in ("--set", setting)]
    with layer_dropped(LAYER, after=1):
        code, found = as_json(capsys, "parity", "attribute", "tiny-qwen3-moe", *settings)
    assert code == 0
    assert found["refined"] == {"load": [f"load:{LAYER}"]}
    assert found["first_module"].startswith(f"{LAYER}.")


def test_a_fault_that_is_not_rebuilt_is_unexplained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sampling reports log-probs that are off, re-scoring is healthy: no factor can be the cause."""
    from lockstep.driver import groups

    original = groups.sequence_of

    def sequence_of(prompt, completion):
        completion.logprobs[:] -= 0.1
        return original(prompt, completion)

    with monkeypatch.context() as planted:
        planted.setattr(groups, "sequence_of", sequence_of)
        assert train(load_recipe("tiny-qwen3-moe", SETTINGS), tmp_path / "run") == 1
    assert from_run(tmp_path / "run").exact, "a stop at step 1 keeps version 0"
    code, out = command(capsys, "parity", "attribute", str(tmp_path / "run"))
    assert code == 1
    assert "unexplained: scored again" in out
    assert "but the run recorded 0.1" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["parity", "replay", "/nowhere", "1"],
        ["parity", "attribute", "tiny-qwen3-moe", "--budget", "1"],
        ["parity", "replay", ".", "0"],
    ],
)
def test_bad_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(capsys, *arguments) == (2, "")


def test_options_of_the_other_kind_of_target_are_refused(stopped: Path) -> None:
    from lockstep.driver.parity_commands import evidence_of

    for target, overrides, step in ((str(stopped), ["steps=1"], None), ("tiny-qwen3-moe", [], 3)):
        with pytest.raises(ReplayError), evidence_of(target, overrides, step):
            raise AssertionError("nothing should be loaded")


def test_the_engines_own_code_is_what_scores(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    original = TorchEngine.score
    monkeypatch.setattr(
        TorchEngine, "score", lambda self, s, path="prefill": calls.append(path) or original(self, s, path)
    )
    bench = from_run(stopped).bench
    bench.scores(bench.setting)
    assert calls == ["decode", "decode"], "one sequence to warm up, then the batch"
