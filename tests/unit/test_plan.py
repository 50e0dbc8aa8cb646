"""The chain of comparisons: it is closed, each link isolates one cause, and a planted cause shows at its link only."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from lockstep.interfaces import LogProbs
from lockstep.parity.plan import NODES, Deployment, Pair, measure_pairs, plan
from lockstep.parity.replay import Bench, Recorded
from lockstep.recipes import find_recipe
from lockstep.rollout import scoring
from tests.contract.engine_models import tiny_model
from tests.unit.test_attribute_faults import make_bench

BOUND = 1e-4
LINKS = ["sampled/decode", "decode/prefill", "prefill/loaded", "loaded/single", "single/trained"]


@pytest.mark.parametrize("refits", [True, False])
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("mixes", [True, False])
def test_the_links_are_a_chain_from_what_was_sampled_to_what_is_trained(refits: bool, packs: bool, mixes: bool) -> None:
    pairs = plan(Deployment(refits, packs, mixes))
    links = [pair for pair in pairs if pair.judged]
    assert links[0].first == "sampled"
    assert links[-1].second == "trained"
    assert all(one.second == other.first for one, other in pairwise(links))
    assert len({pair.isolates for pair in pairs}) == len(pairs)
    assert ("refit" in {pair.isolates for pair in pairs}) is refits
    assert ("packing" in {pair.isolates for pair in pairs}) is packs
    assert ("staleness" in {pair.isolates for pair in pairs}) is mixes
    assert {node for pair in pairs for node in (pair.first, pair.second)} <= NODES.keys()


def test_the_plan_of_a_configured_run() -> None:
    config = find_recipe("tiny-qwen3-moe")
    assert [pair.name for pair in plan(Deployment.of(config))] == LINKS
    alone = config.model_copy(update={"trainer": config.trainer.model_copy(update={"packing": "single"})})
    assert [pair.name for pair in plan(Deployment.of(alone))] == [*LINKS[:3], "loaded/trained"]
    several = config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"optimizer_steps_per_batch": 2})}
    )
    assert [pair.name for pair in plan(Deployment.of(several))] == [*LINKS, "trained/updated"]


def test_where_another_engine_sampled_than_the_one_that_scores_again_the_first_link_says_so() -> None:
    config = find_recipe("tiny-qwen3-moe")
    other = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": "vllm"})})
    own, others = plan(Deployment.of(config)), plan(Deployment.of(other))
    assert "kernels" not in own[0].isolates
    assert "kernels" in others[0].isolates
    assert "another engine sampled" in others[0].reason
    assert others[1:] == own[1:]


def sampled(bench: Bench, shift: float = 0.0) -> Bench:
    """The bench with engine log-probs that its own healthy engine would have reported, off by ``shift``."""
    healthy = Bench(bench.model, bench.setting, bench.recorded).engine_scores(bench.setting)[0]
    bench.recorded = tuple(
        Recorded(
            one.rollout_id,
            replace(one.sequence, logprobs=np.nan_to_num(healthy[one.sequence.sequence_id].logprobs) + shift),
        )
        for one in bench.recorded
    )
    return bench


def failing(bench: Bench) -> dict[str, bool | None]:
    return {one.pair.name: one.holds for one in measure_pairs(bench, plan(Deployment()), {"abs_diff/mean": BOUND})}


def only(*names: str) -> dict[str, bool]:
    return {name: name not in names for name in [*LINKS, "sampled/trained"]}


def test_every_link_of_a_healthy_deployment_holds() -> None:
    assert failing(sampled(make_bench("qwen3_moe"))) == only()


def test_a_fault_of_sampling_shows_at_the_first_link() -> None:
    assert failing(sampled(make_bench(), shift=0.01)) == only("sampled/decode", "sampled/trained")


def test_a_fault_of_the_cache_shows_between_decode_and_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = sampled(make_bench())
    original = scoring._by_decode

    def shifted(*args, **kwargs):
        return [(logprobs + np.float32(0.01), top1, routes) for logprobs, top1, routes in original(*args, **kwargs)]

    monkeypatch.setattr(scoring, "_by_decode", shifted)
    # What was sampled is healthy here, so both links of the decode path differ, and the ends agree.
    assert failing(bench) == only("sampled/decode", "decode/prefill")


def test_a_fault_of_the_refit_shows_against_a_fresh_load() -> None:
    model = tiny_model("llama")
    name = "model.layers.1.mlp.down_proj.weight"
    served = {name: model.state_dict()[name] * 1.1}
    bench = make_bench(model=model, served=served)
    bench.recorded = tuple(
        Recorded(one.rollout_id, replace(one.sequence, logprobs=np.nan_to_num(scores.logprobs)))
        for one in bench.recorded
        for scores in [bench.engine_scores(bench.setting)[0][one.sequence.sequence_id]]
    )
    assert failing(bench) == only("prefill/loaded", "sampled/trained")


def test_a_fault_of_packing_shows_within_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.train.forward import PolicyForward

    bench, allowed = sampled(make_bench()), PolicyForward._allowed
    monkeypatch.setattr(PolicyForward, "_allowed", lambda self, micro: torch.ones_like(allowed(self, micro)).tril())
    assert failing(bench) == only("single/trained", "sampled/trained")


def test_the_ends_never_differ_by_more_than_the_links_add_up_to() -> None:
    bench = sampled(make_bench(served={"model.norm.weight": tiny_model("llama").model.norm.weight * 1.05}), 0.003)
    results = measure_pairs(bench, plan(Deployment()), {"abs_diff/mean": BOUND})
    values = [one.value for one in results if one.value is not None]
    assert len(values) == 6
    assert 0 < values[-1] <= sum(values[:-1]) + 1e-9


def test_nothing_sampled_is_unjudged_and_another_version_needs_its_weights() -> None:
    bench = sampled(make_bench())
    stale = [replace(one.sequence, versions=one.sequence.versions - 1) for one in bench.recorded]
    bench.recorded = tuple(Recorded(one.rollout_id, s) for one, s in zip(bench.recorded, stale, strict=True))
    assert set(failing(bench).values()) == {None}
    with pytest.raises(ValueError, match="the trainer after an optimizer step on that batch needs its weights"):
        measure_pairs(bench, [Pair("trained", "updated", "staleness", "")], {"abs_diff/mean": BOUND})


def test_staleness_is_told_with_its_size_and_not_judged() -> None:
    bench = sampled(make_bench())

    def updated() -> dict[str, LogProbs]:
        scored = bench.trainer_scores(bench.setting)
        return {key: LogProbs(one.logprobs + np.float32(0.5), one.version + 1) for key, one in scored.items()}

    results = measure_pairs(bench, plan(Deployment(mixes_versions=True)), {"abs_diff/mean": BOUND}, updated)
    (staleness,) = [one for one in results if not one.pair.judged]
    assert staleness.value == pytest.approx(0.5, abs=1e-5)
    assert staleness.holds is None
    assert all(one.holds for one in results if one.pair.judged)
