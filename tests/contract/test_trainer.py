"""The trainer against naive float64 references; splits, packings and ranks change rounding only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from lockstep.config.schema import AlgorithmConfig, KlConfig, RandomModel, TrainerConfig
from lockstep.interfaces import LossOutput, LossTokens
from lockstep.model.load import ModelError, load_model
from lockstep.records import NOT_SAMPLED, Batch, Sequence, TrainSequence
from lockstep.train import fsdp, row_attention
from lockstep.train.fsdp import FsdpTrainer
from lockstep.train.objective import PolicyObjective
from lockstep.train.optimizer import MasterOptimizer
from lockstep.train.reference import ReferenceScorer
from tests.contract.tiny_models import tiny_model

TEMPERATURE = 0.8


@dataclass(frozen=True)
class Reinforce:
    """−Σ A l / N. ``skip`` says whether items of advantage 0 may run without a gradient."""

    skip: bool = True

    def __call__(self, tokens: LossTokens) -> LossOutput:
        loss = -(tokens.advantages * tokens.weights * tokens.logprobs).sum() / max(tokens.num_tokens, 1)
        return LossOutput(loss, {"nll": -tokens.logprobs.detach().sum()})

    def needs_gradient(self, item: TrainSequence) -> bool:
        return not self.skip or bool((item.advantages[item.loss_mask] != 0).any())


def train_sequence(name: str, tokens: np.ndarray, prompt: int, advantage: float, **fields: object) -> TrainSequence:
    mask = np.arange(len(tokens)) >= prompt
    versions = np.where(mask, 0, NOT_SAMPLED).astype(np.int32)
    sequence = Sequence(name, tokens.astype(np.int32), mask, np.full(len(tokens), -2, np.float32), versions, versions)
    item = TrainSequence(sequence, name, mask, np.full(len(tokens), advantage, np.float32))
    return replace(item, **fields)


def batch(seed: int = 0, groups: int = 3, size: int = 4, **fields: object) -> Batch:
    """Groups of one prompt; the last group is degenerate (advantages 0)."""
    generator = np.random.default_rng(seed)
    items = []
    for g in range(groups):
        prompt = generator.integers(3, 99, int(generator.integers(4, 12)))
        for k in range(size):
            tokens = np.concatenate([prompt, generator.integers(3, 99, int(generator.integers(1, 12)))])
            advantage = 0.0 if g == groups - 1 else float(generator.normal())
            items.append(train_sequence(f"{g}/{k}", tokens, len(prompt), advantage))
    return Batch(tuple(items), **fields)  # pyright: ignore


def trainer(model_type: str = "qwen3", dtype: str = "float32", **fields: object) -> FsdpTrainer:
    model = tiny_model(model_type, torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    config = TrainerConfig.model_validate({"dtype": dtype, "learning_rate": 1e-2, **fields})
    return FsdpTrainer(model, config, total_optimizer_steps=10, temperature=TEMPERATURE)


def gradients(found: FsdpTrainer) -> dict[str, torch.Tensor]:
    return {name: gradient.clone() for name, gradient in found.optimizer.gradients.items()}


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    assert left.keys() == right.keys()
    scale = max(float(g.abs().max()) for g in right.values())
    assert scale > 0
    assert max(float((left[n] - right[n]).abs().max()) for n in left) < tolerance * scale


def test_loss_logprobs_and_gradient_equal_a_naive_float64_computation() -> None:
    subject, data = trainer(), batch()
    output = subject.forward_backward(data, Reinforce())
    model = tiny_model("qwen3").double()
    total = sum(int(item.loss_mask.sum()) for item in data.items)
    loss = torch.zeros((), dtype=torch.float64)
    for item in data.items:
        ids = torch.from_numpy(item.sequence.tokens).long()
        table = torch.log_softmax(model(input_ids=ids[None]).logits[0].double() / TEMPERATURE, -1)
        live = table[torch.arange(len(ids) - 1), ids[1:]]
        reported = output.logprobs[item.sequence.sequence_id]
        mask = item.sequence.loss_mask
        np.testing.assert_allclose(reported[mask], live.detach().numpy()[mask[1:]], atol=2e-5)
        assert np.isnan(reported[~mask]).all()
        loss = loss - (live * torch.from_numpy(item.advantages[1:] * mask[1:])).sum() / total
    loss.backward()
    assert output.loss == pytest.approx(float(loss.detach()), abs=1e-6)
    expected = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    assert_close(gradients(subject), expected)


ALGORITHMS = {
    "ppo": AlgorithmConfig(),
    "sequence mean": AlgorithmConfig(aggregation="seq_mean_token_mean"),
    "gspo": AlgorithmConfig(loss="gspo", aggregation="seq_mean_token_mean"),
}


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_micro_batches_packing_and_chunks_change_rounding_only(algorithm: str) -> None:
    generator = np.random.default_rng(1)
    data = batch()
    items = tuple(
        replace(item, old_logprobs=generator.normal(-4, 1, len(item.advantages)).astype(np.float32))
        for item in data.items
    )
    objective = PolicyObjective(ALGORITHMS[algorithm])
    found = []
    for fields in (
        {"packing": "single"},
        {"packing": "padded", "micro_batch_tokens": 30},
        {"packing": "packed", "micro_batch_tokens": 64, "logprob_chunk_tokens": 3},
        {"packing": "shared_prompt", "micro_batch_tokens": 4096},
        {"packing": "shared_prompt", "micro_batch_tokens": 25},
        {"gradient_checkpointing": True},
    ):
        subject = trainer(**fields)
        output = subject.forward_backward(Batch(items), objective)
        found.append((output, gradients(subject)))
    reference = found[0]
    assert len({output.num_micro_batches for output, _ in found}) > 2
    for output, gradient in found[1:]:
        assert output.loss == pytest.approx(reference[0].loss, rel=1e-4, abs=1e-6)
        assert output.metrics == pytest.approx(reference[0].metrics, rel=1e-4)
        assert_close(gradient, reference[1])


@pytest.mark.parametrize("model_type", ["qwen3", "deepseek_v3"])
def test_long_rows_go_to_torch_attention_with_the_same_result(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = trainer(model_type), trainer(model_type)
    first = short.forward_backward(batch(), Reinforce())
    monkeypatch.setattr(row_attention, "_DENSE_WIDTH", 1)
    second = long.forward_backward(batch(), Reinforce())
    assert first.loss == pytest.approx(second.loss, rel=1e-5)
    assert_close(gradients(short), gradients(long))


def test_sharing_prompts_feeds_fewer_tokens() -> None:
    counts = {p: trainer(packing=p).forward_backward(batch(), Reinforce()).num_forward_tokens for p in PACKINGS}
    assert counts["shared_prompt"] < counts["packed"] <= counts["padded"]


PACKINGS = ("shared_prompt", "packed", "padded")


def test_items_without_a_gradient_run_forward_only_and_change_nothing_else() -> None:
    data, skipping, full = batch(), trainer(), trainer()
    first, second = skipping.forward_backward(data, Reinforce()), full.forward_backward(data, Reinforce(skip=False))
    assert_close(gradients(skipping), gradients(full), 1e-5)
    assert first.metrics["nll"] == pytest.approx(second.metrics["nll"], rel=1e-5)
    for name, values in second.logprobs.items():
        np.testing.assert_allclose(first.logprobs[name], values, atol=1e-5)


def test_masked_samples_leave_the_denominator_but_keep_their_logprobs() -> None:
    data = batch(groups=2)
    masked = replace(data.items[0], loss_mask=np.zeros_like(data.items[0].loss_mask))
    subject, without = trainer(), trainer()
    output = subject.forward_backward(Batch((masked, *data.items[1:])), Reinforce())
    expected = without.forward_backward(Batch(data.items[1:]), Reinforce())
    assert output.loss == pytest.approx(expected.loss, rel=1e-5)
    assert_close(gradients(subject), gradients(without))
    assert np.isfinite(output.logprobs["0/0"][masked.sequence.loss_mask]).all()


@pytest.mark.parametrize("packing", ["single", "packed", "shared_prompt"])
def test_every_column_of_the_loss_belongs_to_its_token(packing: str) -> None:
    """Whatever the layout: each number is made of its kind, its sequence and its position, and read back by them."""
    kinds = {"old": 1e6, "rollout": 2e6, "weights": 3e6, "reference": 4e6}
    items = []
    for n, item in enumerate(batch(groups=2).items):
        code = (100 * n + np.arange(len(item.advantages))).astype(np.float32)
        mask = item.loss_mask & (np.arange(len(code)) % 3 != 0)  # some tokens are scored and do not count
        items.append(
            replace(
                item,
                sequence=replace(item.sequence, logprobs=code + kinds["rollout"]),
                rollout_id=f"r{n // 2}",
                loss_mask=mask,
                advantages=code,
                old_logprobs=None if n == 3 else code + kinds["old"],
                weights=None if n == 5 else code + kinds["weights"],
                ref_logprobs=code + kinds["reference"],
            )
        )
    lengths = {
        f"r{n // 2}": sum(int(i.loss_mask.sum()) for i in items if i.rollout_id == f"r{n // 2}") for n in range(8)
    }
    subject, seen = trainer(packing=packing, micro_batch_tokens=40), set()

    @dataclass(frozen=True)
    class Reads:
        def __call__(self, tokens: LossTokens) -> LossOutput:
            assert tokens.reference is not None
            owners: dict[int, int] = {}
            for m, code in enumerate(int(value) for value in tokens.advantages):
                n = code // 100
                seen.add(code)
                assert owners.setdefault(int(tokens.sequence_index[m]), n) == n
                live = float(tokens.logprobs[m].detach())
                assert float(tokens.old[m]) == (live if n == 3 else code + kinds["old"])
                assert float(tokens.weights[m]) == (1.0 if n == 5 else code + kinds["weights"])
                assert float(tokens.rollout[m]) == code + kinds["rollout"]
                assert float(tokens.reference[m]) == code + kinds["reference"]
                assert int(tokens.tokens_per_rollout[m]) == lengths[f"r{n // 2}"]
                probes.append((code, live))
            assert sorted(owners) == list(range(tokens.num_sequences))
            assert (tokens.num_tokens, tokens.num_rollouts) == (sum(lengths.values()), 4)
            return LossOutput(tokens.logprobs.sum() * 0, {})

        def needs_gradient(self, item: TrainSequence) -> bool:
            return True

    probes: list[tuple[int, float]] = []
    output = subject.forward_backward(Batch(tuple(items)), Reads())
    assert output.num_micro_batches > 1
    assert seen == {100 * n + int(t) for n, item in enumerate(items) for t in np.flatnonzero(item.loss_mask)}
    for code, live in probes:
        assert live == output.logprobs[items[code // 100].sequence.sequence_id][code % 100]


def test_a_reference_is_needed_by_all_that_count_and_by_nothing_else() -> None:
    """An aborted sample comes without reference log-probs, and the step goes on with the others."""
    objective = PolicyObjective(AlgorithmConfig(kl=KlConfig(place="loss", coefficient=0.5)))
    data = [
        replace(item, ref_logprobs=np.full(len(item.advantages), -3, dtype=np.float32))
        for item in batch(groups=2).items
    ]
    masked = replace(data[1], loss_mask=np.zeros_like(data[1].loss_mask), ref_logprobs=None)
    subject, without = trainer(), trainer()
    output = subject.forward_backward(Batch((data[0], masked, *data[2:])), objective)
    expected = without.forward_backward(Batch((data[0], *data[2:])), objective)
    assert output.loss == pytest.approx(expected.loss, rel=1e-5)
    assert output.metrics == pytest.approx(expected.metrics, rel=1e-5)
    assert_close(gradients(subject), gradients(without))
    with pytest.raises(ValueError, match="some have none"):
        trainer().forward_backward(Batch((data[0], replace(data[1], ref_logprobs=None))), objective)


def test_denominator_overrides_replace_the_counts() -> None:
    plain, fixed = trainer(), trainer()
    count = sum(int(item.loss_mask.sum()) for item in batch().items)
    left = plain.forward_backward(batch(), Reinforce()).loss
    right = fixed.forward_backward(batch(denominator_tokens=2 * count), Reinforce()).loss
    assert left == pytest.approx(2 * right, rel=1e-6)


def test_a_batch_without_counted_tokens_is_a_finite_zero_and_says_so() -> None:
    data = batch(groups=2)
    items = tuple(replace(item, loss_mask=np.zeros_like(item.loss_mask)) for item in data.items)
    subject = trainer()
    before = {n: t.clone() for n, _, _, t in subject.weights().shards()}
    output = subject.forward_backward(Batch(items), Reinforce())
    assert (output.loss, output.metrics) == (0.0, {"empty_batch": 1.0})
    assert gradients(subject) == {}
    result = subject.optim_step()
    assert (result.version, result.grad_norm) == (1, None)
    assert all(torch.equal(t, before[n]) for n, _, _, t in subject.weights().shards())


def test_ranks_of_unequal_token_counts_average_to_the_single_rank_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    long = train_sequence("a", np.arange(3, 63), 2, 1.0)
    short = train_sequence("b", np.arange(70, 75), 4, -2.0)
    single = trainer()
    single.forward_backward(Batch((long, short)), Reinforce())
    monkeypatch.setattr(fsdp, "num_ranks", lambda: 2)
    monkeypatch.setattr(fsdp, "sum_over_ranks", lambda values: [59, 2] if values in ([58, 1], [1, 1]) else values)
    shares = []
    for item in (long, short):
        rank = trainer()
        rank.forward_backward(Batch((item,)), Reinforce())
        shares.append(gradients(rank))
    averaged = {name: (shares[0][name] + shares[1][name]) / 2 for name in shares[0]}
    assert_close(averaged, gradients(single))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_identical_runs_are_bit_equal(dtype: str) -> None:
    finals = []
    for _ in range(2):
        subject = trainer("qwen3_moe", dtype)
        for seed in range(3):
            subject.forward_backward(batch(seed), Reinforce())
            subject.optim_step()
        finals.append({name: tensor.clone() for name, _, _, tensor in subject.weights().shards()})
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


def test_training_lowers_the_loss_of_what_it_trains_on() -> None:
    subject = trainer(dtype="bfloat16")
    data = Batch(tuple(replace(item, advantages=np.ones_like(item.advantages)) for item in batch().items))
    losses = []
    for _ in range(10):
        losses.append(subject.forward_backward(data, Reinforce()).loss)
        subject.optim_step()
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v4"])
def test_logprobs_are_those_of_the_training_forward(model_type: str) -> None:
    subject, data = trainer(model_type), batch()
    trained = subject.forward_backward(data, Reinforce()).logprobs
    scored = subject.logprobs([item.sequence for item in data.items], top1=True, routes=True)
    for item in data.items:
        name, mask = item.sequence.sequence_id, item.sequence.loss_mask
        np.testing.assert_allclose(scored[name].logprobs[mask], trained[name][mask], atol=1e-5)
        routes, top1 = scored[name].routes, scored[name].top1
        assert routes is not None
        assert top1 is not None
        assert (routes >= 0).all()
        assert routes.shape[0] == len(mask) - 1
        assert ((top1 >= 0) == mask).all()


def test_all_positions_are_scored_on_request() -> None:
    sequences = [item.sequence for item in batch().items]
    for found in trainer().logprobs(sequences, positions="all").values():
        assert np.isnan(found.logprobs[0])
        assert np.isfinite(found.logprobs[1:]).all()


def test_a_reference_scores_like_the_policy_it_is_a_copy_of() -> None:
    sequences = [item.sequence for item in batch().items]
    scorer = ReferenceScorer(tiny_model("qwen3"), temperature=TEMPERATURE)
    found, expected = scorer.logprobs(sequences), trainer().logprobs(sequences)
    for sequence in sequences:
        np.testing.assert_array_equal(found[sequence.sequence_id].logprobs, expected[sequence.sequence_id].logprobs)


def test_tied_embeddings_stay_tied_and_get_both_gradients() -> None:
    subject = trainer("llama")
    subject.forward_backward(batch(), Reinforce())
    assert "lm_head.weight" not in subject.optimizer.gradients
    # Rows of tokens that were never fed have a gradient from the head alone.
    assert bool((subject.optimizer.gradients["model.embed_tokens.weight"].abs().sum(1) > 0).all())
    subject.optim_step()
    assert subject.model.lm_head.weight is subject.model.get_input_embeddings().weight


def test_parameters_that_never_get_a_gradient_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    subject = trainer()
    subject.model.register_parameter("unused", torch.nn.Parameter(torch.zeros(2)))
    subject.optimizer = MasterOptimizer(dict(subject.model.named_parameters()), subject.config, 10)
    for seed in range(2):
        subject.forward_backward(batch(seed), Reinforce())
        subject.optim_step()
    assert [record.getMessage() for record in caplog.records].count(
        "1 trainable parameters had no gradient in the first step and are not being trained: unused"
    ) == 1


def test_calls_out_of_order_are_refused() -> None:
    subject = trainer()
    with pytest.raises(RuntimeError, match="optim_step without a forward_backward"):
        subject.optim_step()
    subject.forward_backward(batch(), Reinforce())
    with pytest.raises(RuntimeError, match="forward_backward was called twice"):
        subject.forward_backward(batch(), Reinforce())
    subject.drop_gradients()
    assert subject.optimizer.gradients == {}
    subject.forward_backward(batch(), Reinforce())
    assert subject.optim_step().version == 1


def test_a_non_finite_gradient_is_refused_and_leaves_version_and_weights() -> None:
    subject, data = trainer(), batch()
    bad = replace(data.items[0], advantages=np.full_like(data.items[0].advantages, np.nan))
    before = {n: t.clone() for n, _, _, t in subject.weights().shards()}
    subject.forward_backward(Batch((bad, *data.items[1:])), Reinforce())
    with pytest.raises(FloatingPointError, match="the step is refused"):
        subject.optim_step()
    assert subject.version == 0
    assert all(torch.equal(t, before[n]) for n, _, _, t in subject.weights().shards())


def test_masks_that_count_unsampled_tokens_and_doubled_sequences_are_refused() -> None:
    item = batch().items[0]
    everything = replace(item, loss_mask=np.ones_like(item.loss_mask))
    with pytest.raises(ValueError, match="counts tokens that no policy sampled"):
        trainer().forward_backward(Batch((everything,)), Reinforce())
    with pytest.raises(ValueError, match="in the batch twice"):
        trainer().forward_backward(Batch((item, item)), Reinforce())


def test_a_model_of_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer\.dtype is bfloat16"):
        FsdpTrainer(tiny_model("qwen3"), TrainerConfig(), total_optimizer_steps=1, temperature=1.0)


def test_checkpointing_is_refused_for_a_model_without_layers_that_can() -> None:
    fields = {"n_embd": 32, "n_layer": 1, "n_head": 2, "dff": 32}
    model = load_model(RandomModel(model_type="ctrl", config=fields), torch.float32)
    config = TrainerConfig(dtype="float32", gradient_checkpointing=True)
    with pytest.raises(ModelError, match=r"^trainer\.gradient_checkpointing: CTRL\w+ has no layers .*set it to false"):
        FsdpTrainer(model, config, total_optimizer_steps=1, temperature=1.0)
