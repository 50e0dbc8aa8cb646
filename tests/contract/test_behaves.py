"""The claim ``behaves``: it holds after a refit, fails without one, and says when it could not have told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.schema import BoundConfig, RolloutConfig, TrainerConfig
from lockstep.driver.proof import MEAN, RefitProof
from lockstep.interfaces import LogProbs
from lockstep.model.adapter import num_experts, routers
from lockstep.records import Claim, DerivedReport, Manifest, compact_routes
from lockstep.refit.behaves import Behaviour
from lockstep.refit.bisect import first_difference, recorded_outputs
from lockstep.refit.probes import OtherWeights, Probes, holding, indexer_tokens, make_probes
from lockstep.refit.transaction import RefitError, run_refit
from lockstep.refit.transports import make_transport
from lockstep.rollout.torch_engine import TorchEngine
from lockstep.train.fsdp import FsdpTrainer
from tests.contract.engine_models import ARCHITECTURES, tiny_model

BOUND = 1e-5


def make_pair(architecture: str) -> tuple[FsdpTrainer, TorchEngine]:
    """A trainer and an engine that hold different weights."""
    config = TrainerConfig(dtype="float32", learning_rate=1e-3)
    trainer = FsdpTrainer(tiny_model(architecture, seed=2), config, total_optimizer_steps=1, temperature=1.0)
    return trainer, TorchEngine(tiny_model(architecture, seed=1), RolloutConfig(dtype="float32", num_slots=4))


def probes_of(trainer: FsdpTrainer, **options: Any) -> Probes:
    model, config = trainer.model, trainer.model.config
    experts = num_experts(model) if routers(model) else 0
    return make_probes(
        lambda sequences: trainer.logprobs(sequences, routes=bool(experts)),
        vocab_size=99,
        num_experts=experts,
        context=config.max_position_embeddings,
        model_type=config.model_type,
        **{"padding_id": config.pad_token_id, **options},
    )


def alone(trainer: FsdpTrainer) -> Any:
    """The trainer's log-probs, each sequence by itself: what packing does is not the refit's matter."""
    return lambda sequences: {k: v for s in sequences for k, v in trainer.logprobs([s]).items()}


def check_of(trainer: FsdpTrainer, engine: TorchEngine, **options: Any) -> Behaviour:
    check = Behaviour(probes_of(trainer), engine.score, alone(trainer), **{"bound": BOUND, **options})
    check.before()
    return check


def refit(source: Any, engine: Any, **options: Any) -> dict[str, Claim]:
    receipt = run_refit(source, engine, make_transport("local"), verify=True, **options)
    return {claim.name: claim for claim in receipt.claims}


class Deaf:
    """A receiver that reports success and takes nothing: the refit call, taken out."""

    naming = "module"

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self, manifest: Manifest) -> None:
        del manifest

    def receive(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert list(tensors)

    def commit(self) -> tuple[DerivedReport, ...]:
        return ()

    def resume(self) -> None:
        """Nothing was stopped."""


class OnlyBehaves(Deaf):
    """The same, and it lies about its bytes: only log-probs can tell."""

    def __init__(self, inner: Any, source: Any) -> None:
        super().__init__(inner)
        self.source = source

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, _, _, tensor in self.source.shards())


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_it_holds_after_a_refit_with_power_and_coverage(architecture: str) -> None:
    trainer, engine = make_pair(architecture)
    check = check_of(trainer, engine)
    claim = refit(trainer.weights(), engine.receiver(), behaves=check)["behaves"]
    assert claim.status == "held", claim.detail
    measured = check.measured
    assert measured is not None
    assert measured.power is not None
    assert measured.power > 0.1 > 10 * measured.noise
    assert max(measured.prefill_mean, measured.decode_mean) < BOUND
    assert measured.coverage >= 0.95
    assert "power" in claim.detail
    assert "through" in claim.detail


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "deepseek_v4"])
def test_with_the_refit_taken_out_it_fails(architecture: str) -> None:
    """The twin of the test above: nothing else is changed but that the engine receives nothing."""
    trainer, engine = make_pair(architecture)
    check = check_of(trainer, engine)
    lying: Any = OnlyBehaves(engine.receiver(), trainer.weights())
    with pytest.raises(RefitError, match="behaves: prefill") as caught:
        refit(trainer.weights(), lying, behaves=check)
    assert caught.value.receipt is not None
    assert {claim.name: claim.status for claim in caught.value.receipt.claims}["loaded"] == "held", "bytes don't tell"
    assert check.measured is not None
    assert check.measured.power == 0


def test_on_weights_that_hardly_moved_it_says_that_it_has_no_power() -> None:
    trainer, engine = make_pair("qwen3_moe")
    refit(trainer.weights(), engine.receiver())
    check = check_of(trainer, engine)
    # The second refit brings the same weights: had it brought nothing, no log-prob would tell.
    claim = refit(trainer.weights(), engine.receiver(), behaves=check)["behaves"]
    assert claim.status == "not checked"
    assert claim.detail.startswith("no power: power 0, noise ")
    deaf: Any = Deaf(engine.receiver())
    check = check_of(trainer, engine)
    assert refit(trainer.weights(), deaf, behaves=check)["behaves"].status == "not checked"


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "deepseek_v4", "gpt_oss"])
def test_other_weights_first_give_the_policys_refit_power(architecture: str) -> None:
    trainer, engine = make_pair(architecture)
    refit(trainer.weights(), engine.receiver())  # what an engine that was copied from the trainer starts with
    other = OtherWeights(trainer.weights())

    def reference(sequences: Any) -> dict[str, LogProbs]:
        with holding(trainer.model, other):
            return alone(trainer)(sequences)

    before = {name: tensor.clone() for name, _, _, tensor in trainer.weights().shards()}
    probes = probes_of(trainer)
    first = Behaviour(probes, engine.score, reference, bound=BOUND)
    first.before()
    assert refit(other, engine.receiver(), behaves=first)["behaves"].status == "held"
    for name, _, _, tensor in trainer.weights().shards():
        assert torch.equal(tensor, before[name]), "the trainer's own weights must be untouched"
    second = Behaviour(probes, engine.score, alone(trainer), bound=BOUND)
    second.before()
    assert refit(trainer.weights(), engine.receiver(), behaves=second)["behaves"].status == "held"
    assert second.measured is not None
    assert (second.measured.power or 0) > 0.1


def test_every_tensor_of_other_weights_differs_everywhere() -> None:
    for architecture in ("llama", "deepseek_v4", "gpt_oss"):
        trainer, _ = make_pair(architecture)
        source = trainer.weights()
        tensors = {name: tensor for name, _, _, tensor in source.shards()}
        for name, _, _, tensor in OtherWeights(source).shards():
            assert tensor.dtype == tensors[name].dtype
            assert tensor.shape == tensors[name].shape
            if tensor.is_floating_point():
                assert bool((tensor != tensors[name]).all()), name
            else:
                assert not torch.equal(tensor, tensors[name]), name


UNSEEN = {"glm_moe_dsa": {"model.layers.1.self_attn.indexer.k_norm.bias"}}
"""Too small a part of an indexer's scores to tip the choice of its top-k on the probes."""


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3", "glm_moe_dsa", "inkling_text", "deepseek_v4"])
def test_any_tensor_left_at_other_weights_shows(architecture: str) -> None:
    """One factor for all hides projections before a norm, indexers and router biases, which do not mind a multiple."""
    trainer, _ = make_pair(architecture)
    source, probes = trainer.weights(), probes_of(trainer)
    other = {name: tensor for name, _, _, tensor in OtherWeights(source).shards()}
    last = f".layers.{trainer.model.config.num_hidden_layers - 1}."
    names = [name for name in other if architecture != "deepseek_v4" or last in name]  # V4's probe is long

    class Mixture:
        """The policy's weights, but one tensor of before."""

        def __init__(self, stale: str) -> None:
            self.stale = stale

        def manifest(self) -> Manifest:
            return source.manifest()

        def shards(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
            for name, shape, offset, tensor in source.shards():
                yield name, shape, offset, other[name] if name == self.stale else tensor

    def answers() -> np.ndarray:
        scored = alone(trainer)(probes.sequences)
        return np.concatenate([scored[s.sequence_id].logprobs[s.loss_mask] for s in probes.sequences])

    expected, unseen = answers(), set()
    for name in names:
        with holding(trainer.model, Mixture(name)):
            if np.abs(answers() - expected).mean() <= BOUND:
                unseen.add(name)
    assert len(names) > 20
    assert unseen == UNSEEN.get(architecture, set())


def test_a_stale_layer_fails_on_the_decode_path_alone() -> None:
    """What only decoding computes with (a packed copy, an absorbed projection) never shows in a prefill."""
    trainer, engine = make_pair("qwen3_moe")
    check = check_of(trainer, engine)

    def stale_decode(sequences: Any, path: Any) -> Any:
        scored = engine.score(sequences, path)
        if path == "prefill":
            return scored
        return {name: LogProbs(one.logprobs + np.float32(1e-3), one.version) for name, one in scored.items()}

    stale = Behaviour(check.probes, stale_decode, alone(trainer), bound=BOUND)
    stale.before()
    with pytest.raises(RefitError, match=r"decode 0\.001.*; decoding alone is off: .*cache"):
        refit(trainer.weights(), engine.receiver(), behaves=stale)


def test_log_probs_that_are_not_finite_fail() -> None:
    trainer, engine = make_pair("llama")
    check = check_of(trainer, engine)

    def broken(sequences: Any) -> dict[str, LogProbs]:
        scored = trainer.logprobs(sequences)
        scored["probe/0"].logprobs[3] = np.nan
        return scored

    claim = Behaviour(check.probes, engine.score, broken, bound=1e9)()
    assert claim.status == "failed"
    assert "1 of" in claim.detail


def test_a_bound_above_the_power_is_not_what_is_held_to() -> None:
    """A stale engine would pass it: below the bound nothing can fail. A tenth of the power stands for it."""
    trainer, engine = make_pair("llama")
    check = check_of(trainer, engine, bound=100.0)
    claim = refit(trainer.weights(), engine.receiver(), behaves=check)["behaves"]
    assert claim.status == "held"
    assert "which a stale engine would pass, and of " in claim.detail
    deaf: Any = Deaf(engine.receiver())
    check = check_of(trainer, engine, bound=100.0)
    assert refit(trainer.weights(), deaf, behaves=check)["behaves"].status == "not checked"


def test_an_engine_that_cannot_be_scored_before_leaves_the_power_unknown() -> None:
    trainer, engine = make_pair("llama")
    engine.receiver().abort("an earlier refit broke off")
    check = check_of(trainer, engine)
    claim = refit(trainer.weights(), engine.receiver(), behaves=check)["behaves"]
    assert claim.status == "not checked"
    assert "an earlier refit broke off" in claim.detail


# --- probes -----------------------------------------------------------------------------------------------------------


def test_probes_are_the_same_in_every_process_and_long_enough_for_v4() -> None:
    trainer, _ = make_pair("llama")
    first, second = probes_of(trainer), probes_of(trainer)
    for one, other in zip(first.sequences, second.sequences, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
    assert any((probes_of(trainer, seed=1).sequences[0].tokens != first.sequences[0].tokens).tolist())
    options = {"vocab_size": 99, "model_type": "deepseek_v4"}
    assert make_probes(lambda _: {}, context=4096, **options).coverage.longest > 256
    short = make_probes(lambda _: {}, context=100, **options)
    assert short.coverage.longest == 100
    assert "the architecture needs 272" in short.coverage.text()


@pytest.mark.parametrize(
    ("architecture", "index_topk", "tokens"),
    [("glm_moe_dsa", 15, 17), ("glm_moe_dsa", 14, 16), ("deepseek_v4", 67, 273), ("deepseek_v4", 66, 269)],
)
def test_coverage_says_where_sparse_indexers_had_nothing_to_choose(
    architecture: str, index_topk: int, tokens: int
) -> None:
    """A query of 16 tokens sees 15 keys where that is scored, and an indexer that keeps 15 leaves none out."""
    config = tiny_model(architecture, seed=1).config
    config.index_topk = index_topk
    assert indexer_tokens(config) == tokens
    options = {"vocab_size": 99, "model_type": config.model_type, "indexer_tokens": tokens}
    coverage = make_probes(lambda _: {}, **options).coverage
    kept_all = coverage.longest < tokens
    assert kept_all == (index_topk in (15, 67))
    assert (f"kept every key: what they choose, from {tokens} tokens on, is not covered" in coverage.text()) == kept_all
    assert indexer_tokens(tiny_model("llama", seed=1).config) == 0


@pytest.mark.parametrize("index_topk", [8, 2048])
def test_a_run_says_whether_the_indexers_of_its_model_chose(index_topk: int) -> None:
    trainer, engine = make_pair("glm_moe_dsa")
    trainer.model.config.index_topk = index_topk
    bound = BoundConfig(metric=MEAN, bound=BOUND, evidence="of this test")
    said = RefitProof(trainer, engine, [bound], vocab_limit=99)._make().coverage.text()
    assert ("the sparse indexers kept every key" in said) == (index_topk == 2048)


def test_probes_are_added_until_the_experts_are_reached_and_those_missing_are_named() -> None:
    def scorer(reachable: int) -> Any:
        def score(sequences: Any) -> dict[str, LogProbs]:
            found = {}
            for sequence in sequences:
                random = np.random.default_rng(int(sequence.tokens.sum()))
                ids = random.integers(0, reachable, (len(sequence.tokens) - 1, 2, 1))
                found[sequence.sequence_id] = LogProbs(sequence.logprobs, 0, compact_routes(ids, 512))
            return found

        return score

    few = make_probes(scorer(8), vocab_size=99, num_experts=8)
    many = make_probes(scorer(512), vocab_size=99, num_experts=512)
    assert few.coverage.share >= 0.95
    assert many.coverage.share >= 0.95
    assert len(many.sequences) > len(few.sequences)
    lacking = make_probes(scorer(6), vocab_size=99, num_experts=8, max_probes=16)
    assert lacking.coverage.missing == ((0, 6), (0, 7), (1, 6), (1, 7))
    assert lacking.coverage.text() == "12 of 16 (layer, expert) pairs, not 0/6, 0/7, 1/6, 1/7"
    assert len(lacking.sequences) < 16, "probes that reach nothing new are not kept"
    with pytest.raises(ValueError, match="no expert ids"):
        make_probes(lambda s: {one.sequence_id: LogProbs(one.logprobs, 0) for one in s}, vocab_size=99, num_experts=4)


# --- bisect -----------------------------------------------------------------------------------------------------------


def outputs_of(model: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad(), recorded_outputs(model) as found:
        model(input_ids=torch.arange(3, 33)[None], use_cache=False)
    return found


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("layer", [0, 1])
def test_the_first_module_that_differs_is_the_changed_one(architecture: str, layer: int) -> None:
    ours, theirs = tiny_model(architecture, seed=3), tiny_model(architecture, seed=3)
    assert first_difference(outputs_of(ours), outputs_of(theirs), tolerance=1e-4) is None
    name = f"model.layers.{layer}.post_attention_layernorm"
    with torch.no_grad():
        ours.get_submodule(name).weight.mul_(1.5)
    found = first_difference(outputs_of(ours), outputs_of(theirs), tolerance=1e-4)
    assert found is not None
    assert found.module == name
    assert found.largest > 0.1
    assert name in found.text()


def test_outputs_without_a_module_in_common_were_not_compared() -> None:
    with pytest.raises(ValueError, match="no module in common"):
        first_difference({"a": torch.zeros(1)}, {"b": torch.zeros(1)}, tolerance=1e-4)
    found = first_difference({"a": torch.zeros(2)}, {"a": torch.zeros(3)}, tolerance=1e-4)
    assert found is not None
    assert "2 values against 3" in found.text()
    nan = first_difference({"a": torch.tensor([0.0, float("nan")])}, {"a": torch.zeros(2)}, tolerance=1e-4)
    assert nan is not None
    masked = torch.tensor([-torch.inf, 1.0])
    assert first_difference({"a": masked}, {"a": masked.clone()}, tolerance=1e-4) is None
