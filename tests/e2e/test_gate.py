"""The gate stops a run whose engine does not run the trainer's policy; faults are planted from outside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.loop import train
from lockstep.metrics.run_folder import read_rollouts
from lockstep.metrics.sinks import read_jsonl
from lockstep.model.load import ModelError
from lockstep.parity.rows import unquoted
from lockstep.recipes import load_recipe
from lockstep.refit.transaction import RefitError
from lockstep.rollout.receiver import TorchReceiver
from tests.e2e.conftest import SMALL, assert_same_run, stable_rows

pytestmark = pytest.mark.slow

NO_VERIFY = "refit.verify_every=1000"


def plant_stale_layer(monkeypatch: pytest.MonkeyPatch, from_refit: int) -> None:
    """From the given refit on, one layer keeps its old weights in the engine, and nothing says so."""
    original, count = TorchReceiver.receive, [0]

    def receive(self: TorchReceiver, tensors):
        count[0] += 1
        named = list(tensors)
        if count[0] > from_refit:
            old = dict(self.live())
            named = [(name, old[name].clone() if ".layers.1." in name else tensor) for name, tensor in named]
        original(self, named)

    monkeypatch.setattr(TorchReceiver, "receive", receive)


def test_a_layer_that_goes_stale_stops_the_run_with_the_batch_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant_stale_layer(monkeypatch, from_refit=3)  # other weights, the first policy, and after step 1
    run_dir = tmp_path / "run"
    assert train(load_recipe("tiny-qwen3-moe", [*SMALL, NO_VERIFY, "trainer.learning_rate=0.01"]), run_dir) == 1
    rows = read_jsonl(run_dir / "metrics.jsonl")
    last = rows[-1]
    assert last["verdict/status"] == "stop"
    assert 3 <= last["step"] <= 5, "the refit after step 2, or the first later one that changes the layer, is stale"  # pyright: ignore
    assert last["agreement/abs_diff/mean"] > last["agreement/bound"]  # pyright: ignore[reportOperatorIssue]
    assert "learning_rate" not in last, "the optimizer must not have moved"
    assert {row["verdict/status"] for row in rows[1:-1]} == {"pass"}
    kept = read_rollouts(run_dir, len(rows) - 1)
    difference = np.concatenate(
        [
            np.abs(record.train_logprobs - record.sequence.logprobs)[record.sequence.loss_mask]
            for record in kept
            if record.train_logprobs is not None
        ]
    )
    assert difference.mean() == pytest.approx(last["agreement/abs_diff/mean"], rel=1e-5)
    assert "abs_diff/mean" in capsys.readouterr().err
    assert (run_dir / "report.html").exists()


def test_the_same_fault_is_caught_by_the_receipt_where_it_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_stale_layer(monkeypatch, from_refit=3)  # other weights, the first policy, and after step 1
    with pytest.raises(RuntimeError, match=r"loaded.*layers\.1\."):
        train(
            load_recipe("tiny-qwen3-moe", [*SMALL, "refit.verify_every=1", "trainer.learning_rate=0.01"]),
            tmp_path / "run",
        )


def test_special_tokens_are_told_by_name_where_a_person_reads_them(straight_run: Path) -> None:
    """The end of an answer is a sampled token like any other, and has been the worst one."""
    rows = read_rollouts(straight_run, 1)
    ends = [row.token_texts[-1] for row in rows if row.token_texts and row.status == "finished"]
    assert ends
    assert set(ends) == {"<eos>"}
    assert not any("<eos>" in row.completion_text for row in rows)
    listed = [token for row in read_jsonl(straight_run / "agreement.jsonl") for token in row["worst"]]
    assert all(unquoted(token["before"]) and unquoted(token["text"]) for token in listed)


def test_a_warning_gate_goes_on_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_stale_layer(monkeypatch, from_refit=3)  # other weights, the first policy, and after step 1
    settings = [*SMALL, NO_VERIFY, "trainer.learning_rate=0.01", 'gate.action="warn"']
    assert train(load_recipe("tiny-qwen3-moe", settings), tmp_path / "run") == 0
    statuses = [row.get("verdict/status") for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert statuses[:3] == [None, "pass", "pass"]
    assert statuses[-1] == "warn"


def test_one_nan_from_the_engine_is_not_a_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.driver import groups

    original = groups.sequence_of

    def sequence_of(prompt, completion):
        if completion.request_id.endswith("/1"):
            completion.logprobs[0] = np.nan
        return original(prompt, completion)

    monkeypatch.setattr(groups, "sequence_of", sequence_of)
    assert train(load_recipe("tiny-qwen3-moe", list(SMALL)), tmp_path / "run") == 1
    last = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["step"] == 1
    assert last["agreement/nonfinite"] == 4
    assert "not finite" in str(last["verdict/sentence"])


def test_one_nan_from_the_trainer_is_judged_before_anything_is_computed_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KL in the reward reads the trainer's log-probs before the training forward: the gate still comes first."""
    from lockstep.driver import scoring

    original = scoring.score_models

    def score_models(parts, rollouts):
        scores = original(parts, rollouts)
        sequence = rollouts[0].sequences[0]
        scores.live[sequence.sequence_id].logprobs[np.flatnonzero(sequence.loss_mask)[0]] = np.nan
        return scores

    monkeypatch.setattr("lockstep.loop.score_models", score_models)
    kl = ['algorithm.kl={place="reward", estimator="k1", coefficient=0.1}']
    assert train(load_recipe("tiny-qwen3-moe", [*SMALL, *kl]), tmp_path / "run") == 1
    last = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (last["step"], last["agreement/nonfinite"], last["verdict/status"]) == (1, 1, "stop")
    assert "agreement/rejected" not in last, "no correction has looked at the batch yet"
    assert "not finite" in str(last["verdict/sentence"])
    assert len(read_rollouts(tmp_path / "run", 1)) > 0, "the batch is kept"


def test_one_nan_of_the_engine_in_rollouts_that_no_forward_has_seen_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bypass with two optimizer steps the trainer sees the second half of a batch only after it has moved; where
    that half has no advantage, nothing else would ever look at its log-probs."""
    from lockstep.driver import groups

    original = groups.sequence_of

    def sequence_of(prompt, completion):
        if completion.request_id == "step-1/3/0":
            completion.logprobs[0] = np.nan
        return original(prompt, completion)

    monkeypatch.setattr(groups, "sequence_of", sequence_of)
    bypass = ["algorithm.corrections.bypass=true", "algorithm.optimizer_steps_per_batch=2"]
    assert train(load_recipe("tiny-qwen3-moe", [*SMALL, *bypass]), tmp_path / "run") == 1
    last = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (last["step"], last["agreement/nonfinite"], last["verdict/status"]) == (1, 1, "stop")
    assert "sequence step-1/3/0" in str(last["verdict/sentence"])
    assert "learning_rate" not in last, "the optimizer must not have moved"


@pytest.mark.parametrize("bypass", [True, False])
def test_tokens_that_only_later_optimizer_steps_see_are_counted(
    bypass: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["steps=1", "algorithm.optimizer_steps_per_batch=2", f"algorithm.corrections.bypass={bypass}".lower()]
    assert train(load_recipe("tiny-qwen3-moe", [*SMALL, *settings]), tmp_path / "run") == 0
    out, row = capsys.readouterr().err, read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    rows = read_rollouts(tmp_path / "run", 1)
    assert row["agreement/tokens"] + row["agreement/unseen"] == sum(int(r.sequence.loss_mask.sum()) for r in rows)  # pyright: ignore
    assert (row["agreement/unseen"] > 0) == bypass  # pyright: ignore[reportOperatorIssue]
    assert (f"{row['agreement/unseen']} tokens not judged" in out) == bypass
    assert ("sampled tokens more are not judged" in str(row["verdict/sentence"])) == bypass


def test_correct_switches_a_rejection_on_from_the_next_step_and_a_resume_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep import loop
    from lockstep.driver import groups

    sequence_of, train_on = groups.sequence_of, loop.train_on

    def off_by_a_hundredth(prompt, completion):
        if completion.request_id.endswith("/1"):
            completion.logprobs[0] += 0.01
        return sequence_of(prompt, completion)

    def interrupted_at_step_5(parts, rollouts, step, stop):
        if step == 5:
            raise KeyboardInterrupt
        return train_on(parts, rollouts, step, stop)

    monkeypatch.setattr(groups, "sequence_of", off_by_a_hundredth)
    settings = [*SMALL, "gate.far_factor=1e4", 'gate.action="correct"']
    settings += ['gate.correction={reject=["icepop"], icepop_low=0.999, icepop_high=1.001}']
    assert train(load_recipe("tiny-qwen3-moe", settings), tmp_path / "straight") == 0
    monkeypatch.setattr(loop, "train_on", interrupted_at_step_5)
    assert train(load_recipe("tiny-qwen3-moe", settings), tmp_path / "resumed") == 130
    monkeypatch.setattr(loop, "train_on", train_on)
    assert train(load_recipe("tiny-qwen3-moe", settings), tmp_path / "resumed") == 0

    rows = stable_rows(tmp_path / "straight")[1:]
    assert [row["verdict/status"] for row in rows] == ["warn", *["correct"] * 5]
    assert [row.get("verdict/correcting_since") for row in rows] == [None, *[3] * 5]
    assert [row.get("corrections/icepop_tokens") for row in rows] == [None, None, *[4] * 4]
    assert [row["agreement/rejected"] for row in rows] == [0, 0, *[4] * 4]
    assert "correction icepop is on from the next step" in str(rows[1]["verdict/sentence"])
    assert "correction icepop is on since step 3" in str(rows[2]["verdict/sentence"])
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")


@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm.optimizer_steps_per_batch=2"],
        ['algorithm.corrections.weight="tis"'],
        ['algorithm.corrections.reject=["icepop", "geometric"]', 'algorithm.corrections.weight="tis_seq"'],
        ['algorithm.kl={place="loss", estimator="k3", coefficient=0.05}'],
        ['algorithm.kl={place="reward", estimator="k1", coefficient=0.05}'],
        ['algorithm.advantage="rloo"', 'algorithm.loss="cispo"'],
        ['algorithm.loss="gspo"', 'algorithm.aggregation="seq_mean_token_mean"'],
        ['algorithm.advantage="dr_grpo"', 'algorithm.aggregation="token_sum_norm"', "algorithm.length_norm=4"],
        ['algorithm.advantage="reinforce_pp"', 'algorithm.loss="reinforce"'],
        ["algorithm.dynamic_sampling.enabled=true"],
        ['algorithm.truncated="mask"'],
        ["algorithm.corrections.bypass=true", "algorithm.optimizer_steps_per_batch=2"],
        ['refit.transport="shared"'],
        ['rollout.fast_path="off"', "rollout.record_routes=true"],
        ['trainer.packing="padded"', "trainer.gradient_checkpointing=true"],
        ['trainer.dtype="bfloat16"', 'rollout.dtype="bfloat16"', 'gate.bounds=[{ bound = 0.2, evidence = "a test" }]'],
    ],
    ids=lambda settings: " ".join(settings)[:60],
)
def test_every_way_to_train_runs_and_agrees(tmp_path: Path, settings: list[str]) -> None:
    few = [setting for setting in SMALL if not setting.startswith("steps")]
    assert train(load_recipe("tiny-qwen3-moe", [*few, "steps=2", *settings]), tmp_path / "run") == 0
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["agreement/tokens"] > 0 for row in rows[1:])  # pyright: ignore[reportOperatorIssue]
    assert all(np.isfinite(row["loss"]) for row in rows[1:])  # pyright: ignore[reportArgumentType]


def test_on_policy_distillation_pulls_the_policy_to_its_teacher(tmp_path: Path) -> None:
    teacher = tmp_path / "teacher.toml"
    teacher.write_text(
        'extends = "tiny-qwen3-moe"\nsteps = 12\n[teacher]\nsource = "random"\nmodel_type = "qwen3_moe"\nseed = 3\n'
        "[teacher.config]\nhidden_size = 64\nintermediate_size = 128\nmoe_intermediate_size = 64\n"
        "num_hidden_layers = 2\nnum_attention_heads = 4\nnum_key_value_heads = 2\nhead_dim = 16\nnum_experts = 8\n"
        "num_experts_per_tok = 2\nmax_position_embeddings = 128\n"
        '[algorithm]\nadvantage = "distill"\nloss = "reinforce"\n'
    )
    settings = ["supervised.steps=20", "threads=1", "trainer.learning_rate=0.01", "eval.num_problems=4"]
    assert train(load_recipe(str(teacher), settings), tmp_path / "run") == 0
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    losses = [float(row["loss"]) for row in rows[1:]]  # pyright: ignore[reportArgumentType]
    assert torch.tensor(losses).isfinite().all()
    distance = [float(row["teacher_kl/mean"]) for row in rows[1:]]  # pyright: ignore[reportArgumentType]
    assert distance[-1] < 0.8 * distance[0]


def test_expert_ids_are_refused_of_a_model_without_experts(tmp_path: Path) -> None:
    of_experts = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob")
    dense = ['model.model_type="qwen3"', *(f"model.config.{name}=none" for name in of_experts)]
    with pytest.raises(ModelError, match=r"rollout.record_routes: Qwen3ForCausalLM has no routers"):
        train(load_recipe("tiny-qwen3-moe", [*SMALL, *dense, "rollout.record_routes=true"]), tmp_path / "run")


def test_a_refit_whose_claim_fails_is_filed_with_its_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_stale_layer(monkeypatch, from_refit=3)
    settings = [*SMALL, "refit.verify_every=1", "trainer.learning_rate=0.01"]
    with pytest.raises(RefitError, match=r"layers\.1\."):
        train(load_recipe("tiny-qwen3-moe", settings), tmp_path / "run")
    *before, last = read_jsonl(tmp_path / "run" / "refits.jsonl")
    assert "layers.1." in str(last["error"])
    assert {claim["name"]: claim["status"] for claim in last["claims"]}["loaded"] == "failed"  # pyright: ignore
    assert all("error" not in line for line in before)
