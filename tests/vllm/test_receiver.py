"""The receiver of a real vLLM: what it refuses before a byte moves, and what it loads whatever the buckets.

The public fault first: vLLM's loader ignores what it does not know, and says success.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.refit.transaction import RefitError
from lockstep.refit.verify import claim_covered
from lockstep.rollout.queued_engine import EngineUnfit
from lockstep.rollout.receiver import RefitRefused
from lockstep.rollout.vllm_hooks import served_model
from tests.vllm.models import greedy_tokens, registry, request, run, start_engine, tiny_model
from tests.vllm.refits import (
    Altered,
    answers,
    assert_like_a_fresh_engine,
    close_references,
    loaded_from_disk,
    probes,
    refit,
    weights,
)

pytestmark = pytest.mark.lane(
    "stage-a-vllm", hardware={"cpu": "cpu"}, minutes=0.5, owner="vllm", labels=["refit", "vllm"]
)

FAMILY = "qwen3_moe"
EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"
KEY = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    made = start_engine(tiny_model(FAMILY), derived=registry())
    yield made
    made.close()
    close_references()


def addresses(engine: Any) -> dict[str, int]:
    model = served_model(engine.llm)
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in named if tensor.numel()}


def drop(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def put(name: str, make: Any) -> Any:
    return lambda tensors: tensors.__setitem__(name, make(tensors.get(name)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop(KEY), ["missing", "layers.0.self_attn.qkv_proj.weight", KEY]),
        (drop(EXPERT), ["missing", "layers.1.mlp.experts", EXPERT]),
        (drop("model.norm.weight"), ["missing", "model.norm.weight"]),
        (put("model.layers.0.mlp.gate.bias", lambda _: torch.zeros(8)), ["extra", "model.layers.0.mlp.gate.bias"]),
        (put("model.layers.0.no_such.weight", lambda _: torch.zeros(8)), ["model.layers.0.no_such.weight", "refused"]),
        (put(KEY, lambda t: t[:-1]), [KEY]),
        (put(EXPERT, lambda t: t[:-32]), [EXPERT.removesuffix(".up_proj.weight")[:22], "missing"]),
        (put("model.norm.weight", lambda t: t[:1]), ["model.norm.weight"]),
        (put(KEY, lambda t: t.to(torch.int32)), ["dtype", KEY, "int32"]),
        (put(EXPERT, lambda t: t.to(torch.float64)), ["dtype", EXPERT, "float64"]),
    ],
)
def test_a_wrong_manifest_is_refused_by_name_and_the_engine_goes_on(engine: Any, change: Any, said: list[str]) -> None:
    version, before, places = engine.version, greedy_tokens(engine, 2), addresses(engine)
    with pytest.raises(RefitError) as caught:
        refit(engine, Altered(weights(FAMILY, 3), change))
    for text in said:
        assert text in str(caught.value)
    assert engine.version == version
    assert greedy_tokens(engine, 2) == before
    assert addresses(engine) == places


def test_several_problems_are_reported_at_once(engine: Any) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[KEY], tensors[EXPERT]
        tensors["model.layers.7.self_attn.o_proj.weight"] = torch.zeros(3)

    with pytest.raises(RefitError) as caught:
        refit(engine, Altered(weights(FAMILY, 3), change))
    for name in (KEY, EXPERT, "model.layers.7.self_attn.o_proj.weight"):
        assert name in str(caught.value)


def test_a_push_of_names_that_vllm_ignores_says_success_and_changes_nothing(engine: Any) -> None:
    """What a trainer's own push would do, and what ``begin`` prevents. vLLM drops unknown biases, whatever they hold.

    (vLLM 0.24 also drops transformers' fused expert stacks; 0.32 reads them.)
    """
    from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    refit(engine, weights(FAMILY, 2))
    model, config = served_model(engine.llm), engine.llm.llm_engine.model_config
    pushed = [
        (name.removesuffix(".weight") + ".bias", tensor)
        for name, _, _, tensor in weights(FAMILY, 3).shards()
        if "_norm" in name or ".o_proj" in name
    ]
    with engine.receiver()._configured():
        initialize_layerwise_reload(model)
        loaded = model.load_weights(iter(pushed))
        finalize_layerwise_reload(model, config)
    assert not loaded, "vLLM reports no error"
    assert greedy_tokens(engine) == loaded_from_disk(FAMILY, 2).greedy, "and serves the old weights"

    def added(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update(pushed)

    with pytest.raises(RefitError, match="would be ignored by the engine's loader") as caught:
        refit(engine, Altered(weights(FAMILY, 3), added))
    assert pushed[0][0] in str(caught.value)


def test_module_names_are_refused(engine: Any) -> None:
    from lockstep.model.weights import ModelWeights

    with pytest.raises(RefitRefused, match="reads checkpoint names"):
        engine.receiver().begin(ModelWeights(tiny_model(FAMILY, seed=3), 1).manifest())


def test_one_tensor_a_bucket_in_a_buffer_that_is_used_again(engine: Any) -> None:
    """Borders between q and k, gate and up, expert and expert; the sender overwrites its buffer after each call."""
    source, receiver = weights(FAMILY, 4), engine.receiver()
    receiver.begin(source.manifest())
    buffer = torch.empty(1 << 16)
    for name, shape, _, tensor in source.shards():
        view = buffer[: tensor.numel()].view(shape)
        view.copy_(tensor)
        receiver.receive([(name, view)])
        buffer.fill_(torch.nan)
    receiver.commit()
    receiver.resume()
    assert_like_a_fresh_engine(engine, FAMILY, 4)


def test_a_reload_that_makes_rotary_tables_persistent_is_no_gap_in_the_coverage(engine: Any) -> None:
    """vLLM 0.24 registers every buffer again without saying that no checkpoint holds it."""
    tables = [m for m in served_model(engine.llm).modules() if "cos_sin_cache" in m._non_persistent_buffers_set]
    assert tables
    for module in tables:
        module._non_persistent_buffers_set.discard("cos_sin_cache")
    receipt = refit(engine, weights(FAMILY, 3))
    assert {claim.name: claim.status for claim in receipt.claims}["covered"] == "held"


def test_tensors_may_come_in_any_order(engine: Any) -> None:
    source, receiver = weights(FAMILY, 5), engine.receiver()
    receiver.begin(source.manifest())
    shards = [(name, tensor) for name, _, _, tensor in source.shards()]
    for part in (shards[::2][::-1], shards[1::2]):
        receiver.receive(part)
    receiver.commit()
    receiver.resume()
    assert_like_a_fresh_engine(engine, FAMILY, 5)


def test_the_same_weights_twice_are_the_same_and_nothing_moves(engine: Any) -> None:
    refit(engine, weights(FAMILY, 2))
    first, places = answers(engine), addresses(engine)
    refit(engine, weights(FAMILY, 2))
    second = answers(engine)
    assert second.greedy == first.greedy
    np.testing.assert_array_equal(second.decode, first.decode)
    assert addresses(engine) == places
    assert_like_a_fresh_engine(engine, FAMILY, 2)  # an engine that always says the same would pass what is above


def test_a_declared_subset_is_refused_by_name(engine: Any) -> None:
    version, source = engine.version, weights(FAMILY, 3)
    manifest = source.manifest()
    for tensors in (manifest.tensors, manifest.tensors[:1]):
        with pytest.raises(RefitRefused, match="a subset over version 7: vLLM reloads whole layers"):
            engine.receiver().begin(replace(manifest, base_version=7, tensors=tensors))
    assert engine.version == version
    engine.score([])


def test_a_live_tensor_that_came_after_the_plan_fails_coverage(engine: Any) -> None:
    """The plan of a manifest is kept from refit to refit; what is live is counted each time."""
    source = weights(FAMILY, 2)
    refit(engine, source)
    assert claim_covered(source.manifest(), engine.receiver()).status == "held"
    norm = served_model(engine.llm).get_submodule("model.norm")
    norm.late = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    try:
        claim = claim_covered(source.manifest(), engine.receiver())
    finally:
        del norm.late
    assert claim.status == "failed"
    assert "live but not sent: ['model.norm.late']" in claim.detail


def test_every_live_tensor_is_shown_or_loaded_again(engine: Any) -> None:
    source, receiver = weights(FAMILY, 2), engine.receiver()
    receipt = refit(engine, source)
    claims = {claim.name: claim for claim in receipt.claims}
    assert claims["covered"].status == claims["loaded"].status == claims["derived"].status == "held"
    live, opaque = dict(receiver.live()), receiver.opaque()
    sent = {name: tensor for name, _, _, tensor in source.shards()}
    assert live.keys() | opaque.keys() == sent.keys()
    assert not live.keys() & opaque.keys()
    assert "model.embed_tokens.weight" in live
    assert EXPERT in opaque
    assert "CPU kernel" in opaque[EXPERT]
    for name, tensor in live.items():
        assert torch.equal(tensor, sent[name]), name


def test_a_changed_bit_under_a_kernels_layout_is_found_by_name(engine: Any) -> None:
    source, receiver = weights(FAMILY, 2), engine.receiver()
    refit(engine, source)
    sent = {name: tensor for name, _, _, tensor in source.shards()}
    opaque = {name: sent[name] for name in receiver.opaque()}
    assert all(found is None for _, found in receiver.reload_differences(opaque.items()))
    for name in (KEY, EXPERT):
        changed = {**opaque, name: opaque[name].clone()}
        changed[name].view(torch.int32).view(-1)[3] ^= 1
        different = {one for one, found in receiver.reload_differences(changed.items()) if found is not None}
        assert name in different
        assert all(one.rpartition(".layers.")[2][0] == name.rpartition(".layers.")[2][0] for one in different)


@pytest.mark.parametrize("fault", ["drop", "die", "double", "truncate", "stranger"])
def test_a_broken_transfer_leaves_an_unfit_engine_that_a_full_refit_mends(engine: Any, fault: str) -> None:
    def broken(tensors: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, _, _, tensor) in enumerate(tensors):
            if index == 5 and fault == "die":
                raise ConnectionError("peer is gone")
            if index == 5 and fault == "drop":
                continue
            if index == 5 and fault == "double":
                yield name, tensor
            if index == 5 and fault == "stranger":
                yield "who.weight", tensor
            yield name, tensor[:1] if index == 5 and fault == "truncate" else tensor

    receiver, source, version = engine.receiver(), weights(FAMILY, 6), engine.version
    receiver.begin(source.manifest())

    def transfer() -> None:
        receiver.receive(broken(source.shards()))
        receiver.commit()

    with pytest.raises((RefitRefused, ConnectionError)):
        transfer()
    assert engine.version == version
    with pytest.raises(EngineUnfit):
        engine.score([])
    refit(engine, weights(FAMILY, 3))
    assert greedy_tokens(engine) == loaded_from_disk(FAMILY, 3).greedy, "nothing of the broken transfer is left"


def test_one_refit_at_a_time_and_no_aliasing(engine: Any) -> None:
    source, receiver = weights(FAMILY, 2), engine.receiver()
    receiver.begin(source.manifest())
    with pytest.raises(RuntimeError, match="has begun and is not over"):
        receiver.begin(source.manifest())
    with pytest.raises(RefitRefused, match="can't alias"):
        receiver.alias([])
    receiver.abort("enough")
    with pytest.raises(RuntimeError, match="no refit has begun"):
        receiver.commit()
    refit(engine, source)


def test_deep_sleep_needs_a_refit_before_anything_is_served(engine: Any) -> None:
    engine.sleep(level=2)
    engine.wake()
    with pytest.raises(EngineUnfit):
        engine.score([])
    refit(engine, weights(FAMILY, 2))
    assert_like_a_fresh_engine(engine, FAMILY, 2)


def test_nothing_of_weights_that_were_not_finite_is_left_in_the_cache(engine: Any) -> None:
    """The CPU's attention multiplies what a block held before by 0, and 0 × NaN is NaN: right weights then answered
    NaN after a refit whose every byte was right."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith("v_proj.weight"):
                tensors[name] = torch.full_like(tensors[name], torch.nan)

    refit(engine, Altered(weights(FAMILY, 3), spoil), verify=False)
    spoilt = engine.score(list(probes()), "prefill")
    assert all(np.isnan(one.logprobs[1:]).any() for one in spoilt.values())
    greedy = run(engine, [request("spoilt", [5, 6, 7] * 9, temperature=0.0, max_new_tokens=4)])
    assert greedy[0].finish_reason == "failed"
    refit(engine, weights(FAMILY, 3))
    assert_like_a_fresh_engine(engine, FAMILY, 3)
