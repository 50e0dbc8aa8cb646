"""Routing replay on every architecture that has it: the engine's experts, the trainer's weights of them, any layout."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.routing_replay import compare
from lockstep.config.schema import TrainerConfig
from lockstep.interfaces import LossOutput, LossTokens
from lockstep.loop import train
from lockstep.metrics.run_folder import read_rollouts
from lockstep.metrics.sinks import read_jsonl
from lockstep.model.adapter import routers
from lockstep.model.architectures import architecture_of
from lockstep.model.load import ModelError
from lockstep.parity.measure import measure_step
from lockstep.recipes import load_recipe
from lockstep.records import (
    Batch,
    Problem,
    Rollout,
    Score,
    Sequence,
    TrainSequence,
    compact_routes,
    route_dtype,
    signed_routes,
)
from lockstep.train.forward import PolicyForward
from lockstep.train.fsdp import FsdpTrainer
from lockstep.train.packing import WantedTokens, plan
from lockstep.train.routing_replay import RULES, RoutingReplay, RoutingReplayError
from tests.contract.tiny_models import tiny_model

REPLAYED = ("qwen3_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "deepseek_v4")
LAYOUTS = [
    (name, layout)
    for name in REPLAYED
    for layout in ("single", "padded", "packed", "shared_prompt")
    if name != "deepseek_v4" or layout in ("single", "padded")
]


class Reinforce:
    """−Σ A l / N; an advantage of 0 needs no gradient."""

    def __call__(self, tokens: LossTokens) -> LossOutput:
        return LossOutput(-(tokens.advantages * tokens.logprobs).sum() / tokens.num_tokens, {})

    def needs_gradient(self, item: TrainSequence) -> bool:
        return bool((item.advantages != 0).any())


def sequence(name: str, tokens: np.ndarray, prompt: int) -> Sequence:
    mask = np.arange(len(tokens)) >= prompt
    versions = np.where(mask, 0, -1).astype(np.int32)
    return Sequence(name, tokens.astype(np.int32), mask, np.full(len(tokens), -2, np.float32), versions, versions)


def groups(seed: int = 0, num_groups: int = 2, size: int = 3) -> list[Sequence]:
    """Groups that share a prompt, of ragged lengths."""
    generator = np.random.default_rng(seed)
    found = []
    for g in range(num_groups):
        prompt = generator.integers(3, 99, int(generator.integers(4, 9)))
        for k in range(size):
            tokens = np.concatenate([prompt, generator.integers(3, 99, int(generator.integers(2, 9)))])
            found.append(sequence(f"{g}/{k}", tokens, len(prompt)))
    return found


def trainer(model: Any, replay: bool, **fields: Any) -> FsdpTrainer:
    config = TrainerConfig(dtype="float32", routing_replay=replay, micro_batch_tokens=64, **fields)
    return FsdpTrainer(model, config, total_optimizer_steps=4, temperature=0.8)


def with_own_routes(model: Any, sequences: list[Sequence]) -> list[Sequence]:
    """Sequences with the experts that the model itself picks, alone."""
    scored = trainer(model, False, packing="single").logprobs(sequences, routes=True)
    return [replace(s, routes=scored[s.sequence_id].routes) for s in sequences]


def with_other_routes(model: Any, sequences: list[Sequence], seed: int = 0) -> list[Sequence]:
    """Sequences with random experts, the same for an equal prefix; hash layers keep their table's."""
    found = []
    for s in sequences:
        ids = np.zeros((len(s.tokens) - 1, len(routers(model)), 2), dtype=np.int64)
        gates: list[Any] = routers(model)
        for layer, router in enumerate(gates):
            for t in range(len(ids)):
                if hasattr(router, "tid2eid"):
                    ids[t, layer] = router.tid2eid[int(s.tokens[t])].numpy()
                else:
                    prefix = s.tokens[: t + 1].tolist()
                    ids[t, layer] = np.random.default_rng([seed, layer, *prefix]).permutation(8)[:2]
        found.append(replace(s, routes=compact_routes(ids, 8)))
    return found


def gradients(subject: FsdpTrainer, sequences: list[Sequence]) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]:
    items = tuple(
        TrainSequence(s, s.sequence_id, s.loss_mask, np.full(len(s.tokens), 1.0 + i, np.float32))
        for i, s in enumerate(sequences)
    )
    output = subject.forward_backward(Batch(items), Reinforce())
    found = {name: gradient.clone() for name, gradient in subject.optimizer.gradients.items()}
    subject.drop_gradients()
    return output.logprobs, found


# --- what replay computes ---------------------------------------------------------------------------------------------


def naive_scores(model_type: str, router: Any, logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Scores in float64, position by position, from each architecture's paper or configuration."""
    found = np.zeros(ids.shape)
    for t in range(len(ids)):
        x = logits[t].astype(np.float64)
        if model_type == "qwen3_moe":
            all_scores = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
            scale, normalise = 1.0, router.norm_topk_prob
        elif model_type == "deepseek_v4":
            all_scores, scale, normalise = np.sqrt(np.log1p(np.exp(x))), router.routed_scaling_factor, True
        else:
            all_scores, scale = 1 / (1 + np.exp(-x)), router.routed_scaling_factor
            normalise = router.norm_topk_prob
        chosen = all_scores[ids[t]]
        found[t] = scale * (chosen / chosen.sum() if normalise else chosen)
    return found


@pytest.mark.parametrize("model_type", REPLAYED)
def test_scores_are_those_of_the_architecture_at_the_given_experts(model_type: str) -> None:
    model = tiny_model(model_type)
    replay = RoutingReplay(model)
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(5)])
    for router in replay.routers:
        states = torch.randn(1, 5, 64, generator=generator)
        arguments = (torch.arange(5)[None],) if hasattr(router, "tid2eid") else ()
        table = ids[:, None].expand(-1, len(replay.routers), -1)
        with replay.replayed(table):
            logits, scores, chosen = router(states, *arguments)
        own = router(states, *arguments)
        assert torch.equal(logits, own[0])
        assert torch.equal(chosen.sort(-1).values, ids.sort(-1).values)
        expected = naive_scores(model_type, router, logits.detach().numpy(), chosen.numpy())
        np.testing.assert_allclose(scores.detach().numpy(), expected, rtol=2e-6)


@pytest.mark.parametrize(("model_type", "layout"), LAYOUTS)
def test_equal_routes_change_no_bit(model_type: str, layout: Any) -> None:
    model = tiny_model(model_type)
    sequences = with_own_routes(model, groups())
    plain = gradients(trainer(model, False, packing=layout), sequences)
    replayed = gradients(trainer(model, True, packing=layout), sequences)
    for one, other in zip(plain, replayed, strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize(("model_type", "layout"), LAYOUTS)
def test_other_routes_reach_their_positions_in_every_layout(model_type: str, layout: Any) -> None:
    model = tiny_model(model_type, initializer_range=0.1)
    sequences = with_other_routes(model, groups())
    plain = trainer(model, False, packing=layout).logprobs(sequences)
    found = trainer(model, True, packing=layout).logprobs(sequences, routes=True)
    for s in sequences:
        assert s.routes is not None
        ids = torch.from_numpy(signed_routes(s.routes)).long()
        with torch.no_grad(), RoutingReplay(model).replayed(ids):
            logits = model(torch.from_numpy(s.tokens[:-1]).long()[None]).logits[0] / 0.8
        alone = logits.log_softmax(-1)[torch.arange(len(ids)), torch.from_numpy(s.tokens[1:]).long()].numpy()
        values = found[s.sequence_id].logprobs[s.loss_mask]
        np.testing.assert_allclose(values, alone[s.loss_mask[1:]], atol=2e-5)
        assert np.abs(values - plain[s.sequence_id].logprobs[s.loss_mask]).max() > 1e-3, "other experts must matter"


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v4"])
def test_missing_positions_are_routed_by_the_trainer(model_type: str) -> None:
    model = tiny_model(model_type)
    shapes = [(len(s.tokens) - 1, len(routers(model)), 2) for s in groups()]
    holes = [replace(s, routes=np.full(shape, 255, np.uint8)) for s, shape in zip(groups(), shapes, strict=True)]
    plain = trainer(model, False).logprobs(holes)
    subject = trainer(model, True)
    replayed = subject.logprobs(holes)
    for s in holes:
        np.testing.assert_array_equal(replayed[s.sequence_id].logprobs, plain[s.sequence_id].logprobs)
    items = tuple(TrainSequence(s, s.sequence_id, s.loss_mask, np.ones(len(s.tokens), np.float32)) for s in holes)
    assert subject.forward_backward(Batch(items), Reinforce()).metrics["routing_replay/missing"] == 1.0


def test_a_cached_prompt_takes_part_in_the_prompt_of_a_peer_that_knows_its_experts() -> None:
    model = tiny_model("qwen3_moe")
    first, second, *_ = with_other_routes(model, groups())
    assert second.routes is not None
    cached = second.routes.copy()
    cached[: int(np.flatnonzero(second.loss_mask)[0])] = 255
    whole = trainer(model, True).logprobs([first, second])
    partly = trainer(model, True).logprobs([first, replace(second, routes=cached)])
    for name in whole:
        np.testing.assert_array_equal(whole[name].logprobs, partly[name].logprobs)


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", REPLAYED)
def test_gradients_are_the_finite_differences_of_the_replayed_loss_and_reach_every_gate(model_type: str) -> None:
    model = tiny_model(model_type, initializer_range=0.1)
    sequences = with_other_routes(model, groups())
    subject = trainer(model, True)
    _, found = gradients(subject, sequences)
    gates = [name for name in found if name.endswith("mlp.gate.weight")]
    assert len(gates) == len(routers(model))
    assert all(float(found[name].norm()) > 0 for name in gates)
    # The last gate: nothing after it chooses, so the loss is smooth in it whatever the architecture.
    name = gates[-1]
    weight, direction = model.get_parameter(name), found[name] / found[name].norm()
    values = []
    for step in (1e-2, -1e-2):
        with torch.no_grad():
            weight.add_(direction, alpha=step)
        logprobs = subject.logprobs(sequences)
        with torch.no_grad():
            weight.sub_(direction, alpha=step)
        terms = [
            (1.0 + i) * logprobs[s.sequence_id].logprobs[s.loss_mask].astype(np.float64).sum()
            for i, s in enumerate(sequences)
        ]
        values.append(-sum(terms) / sum(int(s.loss_mask.sum()) for s in sequences))
    slope = (values[0] - values[1]) / 2e-2
    assert slope == pytest.approx(float(found[name].norm()), rel=2e-2)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v4"])
def test_recomputed_layers_replay_the_same_experts(model_type: str) -> None:
    sequences = with_other_routes(tiny_model(model_type), groups())
    kept = gradients(trainer(tiny_model(model_type), True), sequences)
    again = gradients(trainer(tiny_model(model_type), True, gradient_checkpointing=True), sequences)
    for one, other in zip(kept, again, strict=True):
        for name in one:
            np.testing.assert_allclose(one[name], other[name], atol=1e-6)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_ids_of_another_length_or_type_are_no_record() -> None:
    s = groups()[0]
    length = len(s.tokens)
    with pytest.raises(ValueError, match=rf"sequence 0/0: expert ids have shape \({length}, 2, 2\); {length} tokens"):
        replace(s, routes=np.zeros((length, 2, 2), np.uint8))
    with pytest.raises(ValueError, match="0/0: expert ids are int64, expected uint8 or uint16"):
        replace(s, routes=np.zeros((length - 1, 2, 2), np.int64))
    with pytest.raises(ValueError, match="expert ids from 0 to 8 for 8 experts"):
        compact_routes(np.arange(9), 8)


def spoiled(model: Any, change: Any) -> Sequence:
    s = with_other_routes(model, groups())[0]
    assert s.routes is not None
    routes = change(s.routes.copy())
    return replace(s, routes=routes)


def put(at: tuple[int, ...], value: Any) -> Any:
    def change(routes: np.ndarray) -> np.ndarray:
        routes[at] = value
        return routes

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: None, "0/0 carries no expert ids to replay: set rollout.record_routes = true"),
        (lambda routes: routes[:, :1], r"0/0: expert ids have shape \[\d+, 1, 2\], this model needs \[\d+, 2, 2\]"),
        (lambda routes: routes[:, :, :1], r"0/0: expert ids have shape \[\d+, 2, 1\], this model needs \[\d+, 2, 2\]"),
        (lambda routes: routes.astype(np.uint16), "0/0: expert ids are uint16, but 8 experts travel as uint8"),
        (put((3, 1, 0), 8), "0/0, position 3, MoE layer 1: expert id 8 is no expert of 8"),
        (put((3, 1, 0), 255), "0/0, position 3, MoE layer 1: expert id -1 is missing beside known ones"),
        (put((3, 1), 5), r"0/0, position 3, MoE layer 1: experts \[5, 5\] name one twice"),
    ],
)
def test_ids_that_are_not_of_this_model_are_refused_by_name(change: Any, message: str) -> None:
    model = tiny_model("qwen3_moe")
    with pytest.raises(RoutingReplayError, match=message):
        trainer(model, True).logprobs([spoiled(model, change)])


def test_a_hash_layer_whose_table_differs_is_refused() -> None:
    model = tiny_model("deepseek_v4")
    assert [hasattr(router, "tid2eid") for router in routers(model)] == [True, False, False, False]
    s = with_other_routes(model, groups())[0]
    assert s.routes is not None
    assert s.routes.shape[1] == 4, "the hash layer counts"
    router: Any = routers(model)[0]
    router.tid2eid[int(s.tokens[2])] = (router.tid2eid[int(s.tokens[2])] + 1) % 8
    with pytest.raises(RoutingReplayError, match=r"0/0, position \d+ \(token id \d+\), MoE layer 0: .*tables differ"):
        trainer(model, True).logprobs([s])


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("qwen3", "has no experts"),
        ("gpt_oss", "no rule for the scores of GptOssTopKRouter; known: .*Qwen3MoeTopKRouter"),
        ("inkling_text", "no rule for the scores of InklingTopkRouter"),
    ],
)
def test_a_model_without_a_proved_rule_is_refused(model_type: str, message: str) -> None:
    with pytest.raises(ModelError, match=f"trainer.routing_replay: .*{message}"):
        trainer(tiny_model(model_type), True)


def test_a_rule_that_no_longer_fits_its_router_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "Qwen3MoeTopKRouter", RULES["DeepseekV4TopKRouter"])
    model = tiny_model("qwen3_moe")
    for router in routers(model):
        router.score_fn, router.routed_scaling_factor = torch.exp, 1.5  # pyright: ignore
    with pytest.raises(ModelError, match="the rule for Qwen3MoeTopKRouter gives scores up to"):
        RoutingReplay(model)


def test_prompts_through_other_experts_are_not_shared_and_never_merged() -> None:
    model = tiny_model("qwen3_moe")
    assert architecture_of(model.config).packs
    first, second, *_ = with_other_routes(model, groups())
    other = with_other_routes(model, [second], seed=1)[0]
    forward = PolicyForward(model, temperature=0.8, packing="shared_prompt", routing_replay=True)
    wanted = [forward.wanted(s, s.loss_mask) for s in (first, second, other)]
    shared, apart = forward.plan(wanted[:2]), forward.plan([wanted[0], wanted[2]])
    prompt = int(np.flatnonzero(first.loss_mask)[0])
    assert forward.num_tokens(apart[0]) - forward.num_tokens(shared[0]) == prompt
    both = trainer(model, True).logprobs([first, replace(other, sequence_id="other")])
    alone = trainer(model, True, packing="single").logprobs([first, replace(other, sequence_id="other")])
    for name in both:
        np.testing.assert_allclose(both[name].logprobs, alone[name].logprobs, atol=2e-5)
    # A plan that was made without looking at experts is refused rather than given those of one of them.
    blind = plan([WantedTokens(s.tokens, s.loss_mask) for s in (first, other)], "shared_prompt", 4096)
    assert forward.replay is not None
    known = {0: forward.replay.check(first), 1: forward.replay.check(other)}
    with pytest.raises(RoutingReplayError, match=r"sequences 0/0 and 0/1 share position 0 of their prompt, but in MoE"):
        forward.replay.pack(blind[0], [first, other], known)


# --- size, measure, effect --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_experts", "size"), [(8, 1), (128, 1), (255, 1), (256, 2), (384, 2), (65535, 2)])
def test_an_id_costs_one_byte_up_to_255_experts_and_two_above(num_experts: int, size: int) -> None:
    assert route_dtype(num_experts).itemsize == size
    ids = np.array([[[-1, -1]], [[0, num_experts - 1]]])
    routes = compact_routes(ids, num_experts)
    assert routes.nbytes == size * ids.size
    np.testing.assert_array_equal(signed_routes(routes), ids)


def test_more_experts_than_two_bytes_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="65536 experts"):
        route_dtype(65536)


def test_the_trainers_own_choice_is_measured_with_and_without_replay() -> None:
    model = tiny_model("qwen3_moe", initializer_range=0.1)
    sequences = with_other_routes(model, groups())
    own = {s.sequence_id: signed_routes(s.routes) for s in with_own_routes(model, groups()) if s.routes is not None}
    rollouts = [
        Rollout(s.sequence_id, "g", Problem("p", "", None), (s,), "", Score(0.0), "finished") for s in sequences
    ]
    expected = np.concatenate(
        [
            (np.sort(own[s.sequence_id], -1) == np.sort(signed_routes(s.routes), -1)).all(-1)[s.loss_mask[1:]]
            for s in sequences
            if s.routes is not None
        ]
    )
    items = tuple(TrainSequence(s, s.sequence_id, s.loss_mask, np.ones(len(s.tokens), np.float32)) for s in sequences)
    for replay in (False, True):
        output = trainer(model, replay).forward_backward(Batch(items), Reinforce())
        agreement = measure_step(output.logprobs, rollouts, 0, train_routes=output.routes)
        share = agreement.metrics["route_agree"]
        buckets = agreement.buckets["routes"]
        assert sum(bucket.num_tokens for bucket in buckets.values()) == agreement.num_tokens
        if not replay:
            assert share == pytest.approx(float(expected.mean()))
            assert buckets["flipped"].num_tokens == int((~expected.all(-1)).sum())
        # With replay the layers before a router have run the engine's experts: only the first layer sees the same.
        assert 0 < share < 0.5
    assert "route_agree" not in measure_step(output.logprobs, rollouts, 0).metrics
    broken = {name: routes[:-1] for name, routes in output.routes.items()}
    with pytest.raises(ValueError, match=r"sequence 0/0: expert ids \(\d+, 2, 2\), expected"):
        measure_step(output.logprobs, rollouts, 0, train_routes=broken)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_replay_lowers_k3_between_a_bfloat16_engine_and_trainer(model_type: str) -> None:
    """B16: equal weights, yet some routers pick other experts; replay takes away what follows from it."""
    found = compare(model_type, seed=0, num_prompts=4, group_size=4, num_tokens=32)
    without, replayed = found["without"], found["with"]
    assert without["route_agree"] < 0.99
    assert without["routes"]["flipped"] > 3 * without["routes"]["equal"]
    assert replayed["k3"] < without["k3"] / 4
    assert replayed["abs_diff/max"] < without["abs_diff/max"] / 2
    assert replayed["routes"]["flipped"] < 2 * replayed["routes"]["equal"]
    assert found["ids"]["bytes_as_int64"] == 8 * found["ids"]["bytes"]


@pytest.mark.parametrize("optimizer_steps", [1, 2])
def test_a_run_replays_what_its_engine_recorded(tmp_path: Any, optimizer_steps: int) -> None:
    overrides = [
        f"algorithm.optimizer_steps_per_batch={optimizer_steps}",
        "trainer.routing_replay=true",
        "rollout.record_routes=true",
        "steps=2",
        "supervised.steps=3",
        "algorithm.num_prompts=2",
        "algorithm.group_size=4",
        "eval.num_problems=2",
    ]
    assert train(load_recipe("tiny-qwen3-moe", overrides), tmp_path / "run", as_json=True) == 0
    rows: list[Any] = read_jsonl(tmp_path / "run" / "metrics.jsonl")[1:]
    assert len(rows) == 2
    for row in rows:
        assert row["agreement/route_agree"] > 0.9
        assert row["routing_replay/missing"] == 0.0
        assert math.isfinite(row["agreement/k3"])
    for recorded in read_rollouts(tmp_path / "run", 2):
        routes = recorded.sequence.routes
        assert routes is not None
        assert routes.dtype == np.uint8
        assert routes.shape == (len(recorded.sequence.tokens) - 1, 2, 2)
