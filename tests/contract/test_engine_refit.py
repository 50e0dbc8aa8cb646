"""The engine's side of a refit: coverage both ways, the copy, what is derived, versions, and unfitness."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.records import Manifest, TensorSpec
from lockstep.rollout.receiver import RefitRefused, dtype_name, live_weights
from lockstep.rollout.torch_engine import EngineUnfit
from tests.contract import engine_contract as contract
from tests.contract.engine_contract import PROMPTS, as_sequence, make_request, run
from tests.contract.engine_models import ARCHITECTURES, FAST, tiny_model
from tests.contract.test_engine import full_logprobs, make_engine

Weights = dict[str, torch.Tensor]


def weights_of(model: Any) -> tuple[Weights, dict[str, str]]:
    """Checkpoint tensors of a model, each once, and the tied names."""
    live = live_weights(model)
    tied = {name: weight.names[0] for weight in live for name in weight.names[1:]}
    return {weight.names[0]: weight.tensor.detach() for weight in live}, tied


def manifest_of(weights: Weights, version: int, tied: dict[str, str] | None = None) -> Manifest:
    specs = tuple(TensorSpec(name, tuple(t.shape), dtype_name(t), name) for name, t in weights.items())
    return Manifest(version, specs, tied or {})


def refit(engine: Any, model: Any, version: int, alias: bool = False) -> None:
    weights, tied = weights_of(model)
    receiver = engine.receiver()
    receiver.begin(manifest_of(weights, version, tied))
    (receiver.alias if alias else receiver.receive)(weights.items())
    receiver.commit()
    receiver.resume()


def greedy(engine: Any) -> tuple[list[int], np.ndarray]:
    (completion,) = run(engine, [make_request("g", PROMPTS[1], temperature=0.0, max_new_tokens=12)])
    return completion.tokens.tolist(), completion.logprobs


@pytest.mark.parametrize(
    ("architecture", "path"), [(name, "auto") for name in ARCHITECTURES] + [(name, "off") for name in FAST]
)
@pytest.mark.parametrize("alias", [False, True])
def test_after_a_refit_the_engine_samples_as_one_made_from_the_new_weights(architecture, path, alias):
    engine = make_engine(tiny_model(architecture, seed=1), fast_path=path)
    stale = greedy(engine)
    new = tiny_model(architecture, seed=2)
    refit(engine, new, version=3, alias=alias)
    fresh = greedy(make_engine(tiny_model(architecture, seed=2), fast_path=path))
    got = greedy(engine)
    assert got[0] == fresh[0]
    np.testing.assert_allclose(got[1], fresh[1], atol=1e-5)
    assert got[0] != stale[0], "the two weight sets must differ for this test to mean anything"
    assert engine.version == 3


@pytest.mark.parametrize("architecture", FAST)
def test_packed_weights_follow_a_bfloat16_refit_by_prefill_and_by_decode(architecture):
    engine = make_engine(tiny_model(architecture, seed=1, dtype=torch.bfloat16), dtype="bfloat16")
    new = tiny_model(architecture, seed=2, dtype=torch.bfloat16)
    refit(engine, new, version=1)
    fresh = make_engine(tiny_model(architecture, seed=2, dtype=torch.bfloat16), dtype="bfloat16")
    request = make_request("r", PROMPTS[1], max_new_tokens=12)
    (completion,) = run(fresh, [request])
    sequence = as_sequence("r", request.prompt_tokens, completion)
    for path in ("prefill", "decode"):
        ours, theirs = engine.score([sequence], path)["r"], fresh.score([sequence], path)["r"]
        np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)


@pytest.mark.parametrize("architecture", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_live_weights_equal_the_manifest_and_show_a_stale_packed_weight(architecture, dtype):
    name = dtype_name(torch.empty(0, dtype=dtype))
    engine = make_engine(tiny_model(architecture, seed=1, dtype=dtype), dtype=name)
    new = tiny_model(architecture, seed=2, dtype=dtype)
    refit(engine, new, version=1)
    weights, tied = weights_of(new)

    def differing() -> set[str]:
        live = dict(engine.receiver().live())
        assert weights.keys() <= live.keys() <= weights.keys() | tied.keys()
        return {one for one, tensor in live.items() if not torch.equal(tensor, weights[tied.get(one, one)])}

    assert differing() == set()
    if dtype is torch.bfloat16:
        # Weights that arrive in the modules but not in the packed copies are a fault that only live() can show.
        other = tiny_model(architecture, seed=3, dtype=dtype)
        engine.decoder.model.load_state_dict(other.state_dict())
        engine.decoder.refresh = lambda: None
        weights = weights_of(other)[0]
        stale = differing()
        assert any("q_proj" in one for one in stale)
        assert "lm_head.weight" in stale


def test_float32_masters_are_rounded_into_a_bfloat16_engine():
    engine = make_engine(tiny_model("qwen3", dtype=torch.bfloat16), dtype="bfloat16")
    master = tiny_model("qwen3", seed=5)
    refit(engine, master, version=1)
    live = dict(engine.receiver().live())
    for name, tensor in weights_of(master)[0].items():
        assert torch.equal(live[name], tensor.bfloat16())


def test_a_wrong_manifest_is_refused_whole_before_anything_changes():
    engine = make_engine(tiny_model("qwen3_moe"))
    before = greedy(engine)
    weights, _ = weights_of(tiny_model("qwen3_moe", seed=2))
    names = list(weights)
    good = manifest_of(weights, 1)
    by_name = {spec.name: spec for spec in good.tensors}
    missing, extra, doubled, shaped, typed = names[0], "model.layers.9.ghost", names[3], names[4], names[5]
    specs = [spec for name, spec in by_name.items() if name != missing]
    specs = [
        TensorSpec(s.name, (1, *s.shape), s.dtype, s.group) if s.name == shaped
        else TensorSpec(s.name, s.shape, "float16", s.group) if s.name == typed
        else s
        for s in specs
    ]  # fmt: skip
    specs += [by_name[doubled], TensorSpec(extra, (2, 2), "float32", extra)]
    with pytest.raises(RefitRefused) as refusal:
        engine.receiver().begin(Manifest(1, tuple(specs)))
    text = str(refusal.value)
    for word, name in [
        ("missing", missing),
        ("extra", extra),
        ("doubled", doubled),
        ("shape", shaped),
        ("dtype", typed),
    ]:
        assert f"{word}: {name}" in text
    assert greedy(engine)[0] == before[0]
    assert engine.version == 0


def test_a_router_bias_kept_in_float32_is_not_filled_from_bfloat16():
    """Such a bias decides which expert is chosen; rounding it on the way makes trainer and engine choose apart."""
    model = tiny_model("deepseek_v3", dtype=torch.bfloat16)
    bias = next(name for name in model.state_dict() if name.endswith("e_score_correction_bias"))
    router = model.get_submodule(bias.rpartition(".")[0])
    router.e_score_correction_bias = router.e_score_correction_bias.float()
    engine = make_engine(model, dtype="bfloat16")
    weights, _ = weights_of(tiny_model("deepseek_v3", seed=2, dtype=torch.bfloat16))
    assert weights[bias].dtype == torch.bfloat16
    with pytest.raises(RefitRefused, match=f"dtype: {bias}"):
        engine.receiver().begin(manifest_of(weights, 1))


def test_a_tied_head_travels_once_under_any_of_its_names():
    weights, tied = weights_of(tiny_model("llama", seed=2))
    assert tied == {"lm_head.weight": "model.embed_tokens.weight"}
    fresh = greedy(make_engine(tiny_model("llama", seed=2)))
    renamed = {("lm_head.weight" if n == "model.embed_tokens.weight" else n): t for n, t in weights.items()}
    for one in (weights, renamed):
        engine = make_engine(tiny_model("llama", seed=1))
        receiver = engine.receiver()
        receiver.begin(manifest_of(one, 1))
        receiver.receive(one.items())
        receiver.commit()
        receiver.resume()
        assert greedy(engine)[0] == fresh[0]
    both = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    with pytest.raises(RefitRefused, match="are one tied weight here"):
        make_engine(tiny_model("llama")).receiver().begin(manifest_of(both, 1))


def test_a_source_that_ties_fills_both_weights_of_an_engine_that_does_not():
    weights, tied = weights_of(tiny_model("llama", seed=2))
    engine = make_engine(tiny_model("llama", seed=1, tie_word_embeddings=False))
    receiver = engine.receiver()
    receiver.begin(manifest_of(weights, 1, tied))
    receiver.receive(weights.items())
    receiver.commit()
    receiver.resume()
    assert greedy(engine)[0] == greedy(make_engine(tiny_model("llama", seed=2)))[0]


@pytest.mark.parametrize("fault", ["abort", "never arrived", "twice", "unknown", "shape", "source raises"])
def test_a_broken_transfer_leaves_the_engine_unfit_until_a_full_refit_commits(fault):
    engine = make_engine(tiny_model("qwen3", seed=1))
    new = tiny_model("qwen3", seed=2)
    weights, tied = weights_of(new)
    items = list(weights.items())
    receiver = engine.receiver()
    receiver.begin(manifest_of(weights, 1, tied))
    with pytest.raises(EngineUnfit, match="in progress"):
        engine.score([])

    def broken():
        yield from items[:3]
        raise ConnectionError("peer is gone")

    if fault == "abort":
        receiver.receive(items[:4])
        receiver.abort("the other side gave up")
    elif fault == "never arrived":
        receiver.receive(items[:-1])
        with pytest.raises(RefitRefused, match=items[-1][0]):
            receiver.commit()
    elif fault == "source raises":
        with pytest.raises(ConnectionError):
            receiver.receive(broken())
    else:
        wrong = {
            "twice": [items[0], items[0]],
            "unknown": [("ghost", items[0][1])],
            "shape": [(items[0][0], items[0][1][:1])],
        }
        with pytest.raises(RefitRefused):
            receiver.receive(wrong[fault])
    with pytest.raises(EngineUnfit):
        run(engine, [make_request("r", PROMPTS[0])])
    with pytest.raises(EngineUnfit):
        engine.score([])
    assert engine.version == 0
    refit(engine, new, version=2)
    assert greedy(engine)[0] == greedy(make_engine(tiny_model("qwen3", seed=2)))[0]
    assert engine.version == 2


def test_commit_and_receive_need_a_begin_and_begin_needs_the_last_refit_to_be_over():
    engine = make_engine(tiny_model("qwen3"))
    receiver = engine.receiver()
    with pytest.raises(RuntimeError, match="begin"):
        receiver.commit()
    with pytest.raises(RuntimeError, match="begin"):
        receiver.receive([])
    manifest = manifest_of(weights_of(tiny_model("qwen3"))[0], 1)
    receiver.begin(manifest)
    with pytest.raises(RuntimeError, match="not over"):
        receiver.begin(manifest)


@pytest.mark.parametrize("path", ["auto", "off"])
def test_tokens_after_a_refit_carry_the_new_version_of_weights_and_cache(path):
    old, new = tiny_model("qwen3", seed=1), tiny_model("qwen3", seed=2)
    engine = make_engine(tiny_model("qwen3", seed=1), fast_path=path)
    contract.tokens_after_a_refit_carry_the_new_version_of_weights_and_cache(
        engine,
        lambda: refit(engine, new, version=5),
        lambda prompt, completion: full_logprobs(old, prompt, completion),
        lambda prompt, completion: full_logprobs(new, prompt, completion),
    )


def test_a_prompt_prefilled_before_a_refit_is_not_reused_after_it():
    engine = make_engine(tiny_model("qwen3", seed=1), num_slots=2)
    requests = [make_request(str(i), PROMPTS[3], seed=i, max_new_tokens=4) for i in range(6)]
    new = tiny_model("qwen3", seed=2)

    async def scenario() -> list[Any]:
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        while engine.stats.num_finished < 2:  # siblings wait for slots; their prompt is kept for them
            await asyncio.sleep(0)
        refit(engine, new, version=1)
        return list(await asyncio.gather(*tasks))

    last = asyncio.run(scenario())[-1]
    assert last.versions.tolist() == [1] * 4
    expected = full_logprobs(new, requests[-1].prompt_tokens, last)
    np.testing.assert_allclose(last.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("architecture", ["glm_moe_dsa", "deepseek_v4"])
@pytest.mark.parametrize("kept", [False, True])
def test_an_indexers_cached_keys_do_not_outlive_its_weights(architecture, kept, monkeypatch):
    """Only the indexer's weights are new: all other keys and values are those of before, and a stale entry would change
    nothing but which positions are attended to."""
    old, new = tiny_model(architecture, seed=1), tiny_model(architecture, seed=1)
    other = dict(tiny_model(architecture, seed=2).named_parameters())
    indexers = [(name, parameter) for name, parameter in new.named_parameters() if ".indexer." in name]
    assert indexers
    with torch.no_grad():
        for name, parameter in indexers:
            parameter.copy_(other[name])
    engine = make_engine(old, num_slots=2)
    if kept:  # the entry, switched off
        monkeypatch.setattr(engine._scheduler, "drop_caches", lambda: None)
    prompt = np.random.default_rng(0).integers(3, 90, 48).astype(np.int32)
    requests = [make_request(str(i), prompt.tolist(), seed=i, max_new_tokens=8) for i in range(6)]

    async def scenario() -> list[Any]:
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        while engine.stats.num_finished < 2:
            await asyncio.sleep(0)
        refit(engine, new, version=1)
        return list(await asyncio.gather(*tasks))

    last = asyncio.run(scenario())[-1]
    expected = full_logprobs(new, requests[-1].prompt_tokens, last)
    difference = np.abs(last.logprobs - expected).max()
    assert difference > 1e-3 if kept else difference < 1e-5


def test_a_pause_of_the_callers_outlasts_a_refit():
    engine = make_engine(tiny_model("qwen3", seed=1))
    contract.a_pause_of_the_callers_outlasts_a_refit(engine, lambda: refit(engine, tiny_model("qwen3", seed=2), 1))
