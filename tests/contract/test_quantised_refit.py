"""A quantised refit into the torch engine: it computes with the dequantised weights, and no half-loaded one passes.

The reference is transformers' own forward over a module whose weights were dequantised here by loops over blocks in
float64, from the trainer's weights: nothing of ``lockstep.numerics`` is in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.schema import RolloutConfig, TrainerConfig
from lockstep.numerics.blocks import QuantisationError
from lockstep.parity.factors import builtin_factors
from lockstep.parity.replay import Bench, Recorded, Setting, served_differences
from lockstep.records import Manifest, Quantisation, Sequence, TensorSpec
from lockstep.refit.names import as_checkpoint, as_module
from lockstep.refit.quantised import dequantised, quantised, served_weights
from lockstep.refit.quantised_names import form_of
from lockstep.refit.transaction import Receipt, RefitError, run_refit
from lockstep.refit.transports import make_transport, whole_tensors
from lockstep.refit.verify import claim_covered, claim_loaded
from lockstep.rollout.torch_engine import EngineUnfit, TorchEngine
from lockstep.train.fsdp import FsdpTrainer
from tests.contract.engine_models import tiny_model

SCHEMES: tuple[Quantisation, ...] = ("fp8", "fp8_ue8m0", "mxfp4_experts")
ARCHITECTURES = ("qwen3_moe", "deepseek_v3", "deepseek_v4")
STACK = "model.layers.1.mlp.experts.gate_up_proj"
LINEAR = "model.layers.0.self_attn.q_proj.weight"

E4M3 = np.array([(1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6 for e in range(16) for m in range(8)][:127])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def make_pair(
    scheme: Quantisation, architecture: str = "qwen3_moe", dtype: Any = "float32"
) -> tuple[FsdpTrainer, TorchEngine]:
    """A trainer and an engine that hold different weights."""
    config = TrainerConfig(dtype="float32", learning_rate=1e-3)
    trainer = FsdpTrainer(tiny_model(architecture, seed=2), config, total_optimizer_steps=1, temperature=1.0)
    rollout = RolloutConfig(dtype=dtype, num_slots=4, quantisation=scheme)
    model = tiny_model(architecture, seed=1, dtype=getattr(torch, dtype))
    return trainer, TorchEngine(model, rollout)


def refit(trainer: FsdpTrainer, engine: TorchEngine, scheme: Quantisation, verify: bool = True) -> Receipt:
    source = quantised(trainer.weights(), scheme)
    return run_refit(source, engine.receiver(), make_transport("local"), verify=verify)


def probe(length: int = 40) -> Sequence:
    tokens = np.random.default_rng(0).integers(3, 90, length).astype(np.int32)
    zeros = np.zeros(length, np.int32)
    return Sequence("probe", tokens, np.arange(length) >= 1, np.zeros(length, np.float32), zeros, zeros)


def engine_scores(engine: TorchEngine, path: Any) -> np.ndarray:
    return engine.score([probe()], path)["probe"].logprobs[1:].astype(np.float64)


def module_scores(model: Any) -> np.ndarray:
    """Log-probs by transformers' own forward, nothing of ours in between."""
    tokens = torch.from_numpy(probe().tokens.astype(np.int64))[None]
    with torch.no_grad():
        logits = model.eval()(tokens, use_cache=False).logits[0].double()
    return torch.log_softmax(logits, -1)[:-1].gather(1, tokens[0, 1:, None])[:, 0].numpy()


def rounded(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Values on the grid ``table`` of magnitudes, nearest, ties to the even index."""
    magnitude, middles = np.abs(values), (table[1:] + table[:-1]) / 2
    index = np.searchsorted(middles, magnitude)  # at a middle: the lower one
    tie = (index < len(middles)) & (magnitude == middles[np.minimum(index, len(middles) - 1)])
    index += tie & (index % 2 == 1)
    return np.copysign(table[index], values)


def round_trip(weight: torch.Tensor, form: str, parts: int) -> torch.Tensor:
    """Quantised and dequantised, block by block, in float64."""
    x = weight.detach().double().numpy()
    if x.ndim == 3:
        return torch.stack([round_trip(torch.from_numpy(one), form, parts) for one in x])
    if parts > 1:
        halves = np.split(x, parts)
        return torch.cat([round_trip(torch.from_numpy(half), form, 1) for half in halves])
    result = np.empty_like(x)
    height, width = (1, 32) if form == "mxfp4" else (128, 128)
    for i in range(0, x.shape[0], height):
        for j in range(0, x.shape[1], width):
            block = x[i : i + height, j : j + width]
            largest, table = (6.0, E2M1) if form == "mxfp4" else (448.0, E4M3)
            scale = float(np.float32(np.abs(block).max()) / np.float32(largest))
            if form != "fp8":
                scale = 2.0 ** np.ceil(np.log2(np.abs(block).max() / largest))
            # The quotient is rounded to float32 before it is rounded to a code, as every kernel does.
            codes = rounded((block.astype(np.float32) / np.float32(scale)).astype(np.float64), table)
            result[i : i + height, j : j + width] = codes * scale
    return torch.from_numpy(result).float()


def naive(trainer: FsdpTrainer, scheme: Quantisation) -> Any:
    """A copy of the trainer's module with every quantised weight replaced by its round trip."""
    model = copy.deepcopy(trainer.model)
    model_type = model.config.get_text_config().model_type
    changed = 0
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            form = form_of(model_type, scheme, name)
            if form is not None:
                tensor.copy_(round_trip(tensor, form, 2 if name.endswith("gate_up_proj") else 1))
                changed += 1
    assert changed >= 2
    return model


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_engine_computes_with_the_dequantised_weights_after_each_of_two_refits(
    architecture: str, scheme: Quantisation, record_property: Callable[[str, object], None]
) -> None:
    trainer, engine = make_pair(scheme, architecture)
    for turn in range(2):
        if turn:
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.mul_(1.07)
        wanted = module_scores(naive(trainer, scheme))
        for path in ("prefill", "decode"):
            assert np.abs(engine_scores(engine, path) - wanted).max() > 1e-3, "without the refit this test must fail"
        receipt = refit(trainer, engine, scheme)
        for path in ("prefill", "decode"):
            difference = np.abs(engine_scores(engine, path) - wanted)
            assert difference.mean() < (3e-6 if architecture == "deepseek_v4" else 1e-6), "rounding of float32 alone"
            assert difference.max() < 1e-5
        claims = {claim.name: claim for claim in receipt.claims}
        assert claims["covered"].status == claims["loaded"].status == "held"
        assert "block scales" in claims["covered"].detail
        mismatch = np.abs(engine_scores(engine, "decode") - module_scores(trainer.model))
        record_property(f"mismatch of {architecture} {scheme} at refit {turn}", float(mismatch.mean()))
        assert mismatch.mean() > 1e-4, "quantised weights are other weights than the trainer's"


def test_without_quantisation_the_same_pair_agrees_a_hundred_times_better() -> None:
    means: dict[str, float] = {}
    for scheme in ("none", *SCHEMES):
        trainer, engine = make_pair(scheme)
        refit(trainer, engine, scheme)
        means[scheme] = float(np.abs(engine_scores(engine, "decode") - module_scores(trainer.model)).mean())
    plain = means.pop("none")
    assert plain < 1e-6
    assert min(means.values()) > 100 * plain


def test_a_bfloat16_engine_holds_the_dequantised_weights_rounded_once() -> None:
    trainer, engine = make_pair("fp8", dtype="bfloat16")
    receipt = refit(trainer, engine, "fp8")
    assert not receipt.failed
    live = dict(engine.receiver().live())
    plain = dict(whole_tensors(dequantised(quantised(trainer.weights(), "fp8"))))
    assert plain[STACK].dtype == torch.float32
    assert torch.equal(live[STACK], plain[STACK].to(torch.bfloat16))
    assert not torch.equal(live[STACK], trainer.model.get_parameter(STACK).to(torch.bfloat16))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_both_namings_quantise_to_the_same_weights(architecture: str, scheme: Quantisation) -> None:
    source = FsdpTrainer(
        tiny_model(architecture, seed=2), TrainerConfig(dtype="float32"), total_optimizer_steps=1, temperature=1.0
    ).weights()
    by_module = dict(whole_tensors(dequantised(quantised(source, scheme))))
    by_checkpoint = dict(whole_tensors(as_module(dequantised(quantised(as_checkpoint(source), scheme)))))
    assert by_module.keys() == by_checkpoint.keys()
    for name, tensor in by_module.items():
        assert torch.equal(tensor, by_checkpoint[name]), name


def test_the_same_weights_give_the_same_bytes() -> None:
    trainer, _ = make_pair("fp8")
    for scheme in SCHEMES:
        first = [(name, t.view(torch.uint8).clone()) for name, t in whole_tensors(quantised(trainer.weights(), scheme))]
        second = whole_tensors(quantised(trainer.weights(), scheme))
        for (name, before), (again, tensor) in zip(first, second, strict=True):
            assert name == again
            assert torch.equal(before, tensor.view(torch.uint8)), name


# --- faults -----------------------------------------------------------------------------------------------------------


class Changed:
    """A source whose manifest and tensors are changed on the way."""

    def __init__(
        self,
        inner: Any,
        spec: Callable[[TensorSpec], TensorSpec | None] = lambda spec: spec,
        tensor: Callable[[str, torch.Tensor], torch.Tensor | None] = lambda _, tensor: tensor,
    ) -> None:
        self.inner, self.spec, self.tensor = inner, spec, tensor

    def manifest(self) -> Manifest:
        manifest = self.inner.manifest()
        specs = (self.spec(spec) for spec in manifest.tensors)
        return replace(manifest, tensors=tuple(spec for spec in specs if spec is not None))

    def shards(self) -> Iterator[Any]:
        for name, tensor in whole_tensors(self.inner):
            changed = self.tensor(name, tensor)
            if changed is not None:
                yield name, tuple(changed.shape), (0,) * changed.ndim, changed


def refused(source: Any, engine: TorchEngine, match: str) -> None:
    """The refit is refused before anything moves: the engine is as it was."""
    before = engine_scores(engine, "prefill")
    with pytest.raises(RefitError, match=match):
        run_refit(source, engine.receiver(), make_transport("local"), verify=True)
    np.testing.assert_array_equal(engine_scores(engine, "prefill"), before)
    assert engine.version == 0


def broken_off(source: Any, engine: TorchEngine, match: str) -> None:
    """The refit breaks off: the engine serves nothing until a full one commits."""
    with pytest.raises(RefitError, match=match):
        run_refit(source, engine.receiver(), make_transport("local"), verify=True)
    with pytest.raises(EngineUnfit):
        engine.score([probe()])


def without(name: str) -> Callable[[TensorSpec], TensorSpec | None]:
    return lambda spec: None if spec.name == name else spec


def test_a_manifest_with_half_a_pair_or_an_ill_shaped_scale_is_refused_by_name() -> None:
    trainer, engine = make_pair("fp8")
    source = quantised(trainer.weights(), "fp8")
    scale = f"{STACK}_scale_inv"

    def changed(**fields: Any) -> Callable[[TensorSpec], TensorSpec]:
        return lambda spec: replace(spec, **fields) if spec.name == scale else spec

    refused(Changed(source, without(scale)), engine, f"half a pair: {STACK} travels without its block scales {scale}")
    refused(Changed(source, without(STACK)), engine, f"half a pair: the block scales {scale} travel without their")
    ill_shaped = Changed(source, changed(shape=(8, 1, 1)))
    refused(ill_shaped, engine, rf"shape: the block scales {scale} are \(8, 1, 1\), .* needs")
    refused(Changed(source, changed(dtype="bfloat16")), engine, f"dtype: the block scales {scale} are bfloat16")
    refused(Changed(source, changed(group="alone")), engine, f"group: {STACK} is of .*, its block scales of alone")
    forgetful = Changed(source, lambda spec: replace(spec, scale="") if spec.name == STACK else spec)
    refused(forgetful, engine, f"half a pair: {STACK} is float8_e4m3fn and names no block scales")


def test_an_engine_of_another_scheme_refuses() -> None:
    trainer, plain = make_pair("none")
    refused(quantised(trainer.weights(), "fp8"), plain, "is quantised 'fp8', this engine serves 'none'")
    _, engine = make_pair("fp8")
    with pytest.raises(ValueError, match="is quantised 'none', this engine serves 'fp8'"):
        engine.receiver().begin(trainer.weights().manifest())
    refused(quantised(trainer.weights(), "fp8_ue8m0"), engine, "is quantised 'fp8_ue8m0', this engine serves 'fp8'")


def test_a_half_loaded_scale_breaks_the_refit_off() -> None:
    trainer, _ = make_pair("fp8")
    source = quantised(trainer.weights(), "fp8")
    scale = f"{LINEAR}_scale_inv"

    def at(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Changed:
        return Changed(source, tensor=lambda n, t: change(t) if n == name else t)

    def engine() -> TorchEngine:
        return make_pair("fp8")[1]

    broken_off(at(scale, lambda _: None), engine(), f"half a pair: {LINEAR} without {scale}")
    broken_off(at(LINEAR, lambda _: None), engine(), f"half a pair: {scale} without {LINEAR}")
    broken_off(at(scale, torch.zeros_like), engine(), f"{LINEAR}: 1 of 1 block scales are not positive and finite")
    broken_off(at(scale, lambda t: torch.full_like(t, torch.nan)), engine(), f"{LINEAR}: 1 of 1 block scales")
    broken_off(at(scale, lambda t: t.repeat(2, 1)), engine(), f"{scale} arrived as float32")
    broken_off(at(scale, lambda t: t.bfloat16()), engine(), f"{scale} arrived as bfloat16")
    poisoned = at(LINEAR, lambda t: torch.full(t.shape, 0x7F, dtype=torch.uint8).view(t.dtype))
    broken_off(poisoned, engine(), f"{LINEAR}: .* codes are NaN")


def test_half_a_pair_waits_for_the_other_one_in_memory_of_its_own() -> None:
    trainer, engine = make_pair("fp8")
    source, receiver = quantised(trainer.weights(), "fp8"), engine.receiver()
    receiver.begin(source.manifest())
    for name, tensor in whole_tensors(source):
        buffer = tensor.clone()
        receiver.receive([(name, buffer)])
        buffer.view(torch.uint8).fill_(0x7F)  # the next bucket is filled into the same memory
    receiver.commit()
    assert claim_loaded(source.manifest(), source, receiver).status == "held"


def test_a_commit_with_half_a_pair_is_refused() -> None:
    trainer, engine = make_pair("fp8")
    source, receiver = quantised(trainer.weights(), "fp8"), engine.receiver()
    receiver.begin(source.manifest())
    receiver.receive((name, tensor) for name, tensor in whole_tensors(source) if name != f"{STACK}_scale_inv")
    with pytest.raises(ValueError, match=f"half a pair: {STACK} without {STACK}_scale_inv"):
        receiver.commit()
    with pytest.raises(EngineUnfit):
        engine.score([probe()])


def test_pairs_may_come_in_any_order_and_in_several_calls() -> None:
    trainer, engine = make_pair("fp8")
    source, receiver = quantised(trainer.weights(), "fp8"), engine.receiver()
    receiver.begin(source.manifest())
    tensors = list(whole_tensors(source))
    border = [name for name, _ in tensors].index(STACK)
    receiver.receive(reversed(tensors[border:]))
    receiver.receive(tensors[:border])
    receiver.commit()
    assert claim_loaded(source.manifest(), source, receiver).status == "held"


def test_quantised_weights_are_not_shared() -> None:
    trainer, engine = make_pair("fp8")
    with pytest.raises(RefitError, match="is quantised and can't be shared"):
        run_refit(quantised(trainer.weights(), "fp8"), engine.receiver(), make_transport("shared"), verify=True)


def test_weights_that_are_not_finite_are_named() -> None:
    trainer, engine = make_pair("fp8")
    with torch.no_grad():
        trainer.model.get_parameter(STACK)[3, 5, 7] = float("nan")
    broken_off(quantised(trainer.weights(), "fp8"), engine, f"{STACK}: 1 value")


class LosesScales:
    """A receiver that dequantises a weight with its neighbour's scale."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def receive(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        wrong = ((name, tensor * 2 if name == f"{STACK}_scale_inv" else tensor) for name, tensor in tensors)
        self.inner.receive(wrong)


def test_a_wrong_scale_that_is_plausible_fails_the_loaded_claim() -> None:
    trainer, engine = make_pair("fp8")
    source: Any = quantised(trainer.weights(), "fp8")
    receiver: Any = LosesScales(engine.receiver())
    with pytest.raises(RefitError, match=f"loaded: {STACK}: .* values differ"):
        run_refit(source, receiver, make_transport("local"), verify=True)


def test_the_loaded_claim_fails_on_unquantised_weights() -> None:
    trainer, engine = make_pair("none")
    run_refit(trainer.weights(), engine.receiver(), make_transport("local"), verify=True)
    source = quantised(trainer.weights(), "fp8")
    assert claim_covered(source.manifest(), engine.receiver()).status == "held"
    assert claim_loaded(source.manifest(), source, engine.receiver()).status == "failed"


def test_a_plain_source_is_quantised_as_the_engine_asks() -> None:
    trainer, engine = make_pair("mxfp4_experts")
    receipt = run_refit(trainer.weights(), engine.receiver(), make_transport("local"), verify=True)
    assert {claim.name: claim.status for claim in receipt.claims}["loaded"] == "held"
    served = dict(whole_tensors(served_weights(trainer.weights(), "mxfp4_experts")))
    live = dict(engine.receiver().live())
    assert all(torch.equal(served[name], live[name]) for name in (STACK, LINEAR))
    assert torch.equal(served[LINEAR], trainer.model.get_parameter(LINEAR)), "only experts are mxfp4"
    assert not torch.equal(served[STACK], trainer.model.get_parameter(STACK))


def test_a_model_without_a_quantised_form_is_refused_before_anything_moves() -> None:
    trainer, engine = make_pair("fp8", "gpt_oss")
    with pytest.raises(RefitError, match="gpt_oss has no quantised form"):
        run_refit(trainer.weights(), engine.receiver(), make_transport("local"), verify=True)
    assert np.isfinite(engine_scores(engine, "prefill")).all()


def test_a_replay_quantises_as_the_run_did_and_names_quantisation_as_the_cause() -> None:
    trainer, engine = make_pair("fp8")
    refit(trainer, engine, "fp8")
    assert not served_differences(trainer.weights(), engine.receiver()), "the engine holds what the refit brought"
    setting = Setting(RolloutConfig(dtype="float32", quantisation="fp8"), TrainerConfig(dtype="float32"))
    recorded = Recorded("r", replace(probe(), logprobs=engine.score([probe()], "decode")["probe"].logprobs))
    bench = Bench(trainer.model, setting, [recorded])
    wanted = module_scores(trainer.model)

    def mismatch(changed: Setting) -> float:
        return float(np.abs(bench.engine_scores(changed)[0]["probe"].logprobs[1:] - wanted).mean())

    factors = {factor.name: factor for factor in builtin_factors(bench)}
    assert mismatch(setting) > 1e-2
    replayed = bench.engine_scores(setting)[0]["probe"].logprobs
    np.testing.assert_allclose(replayed, recorded.sequence.logprobs, atol=1e-5)
    change = factors["unquantised"].change
    assert change is not None
    assert mismatch(change(setting)) < 1e-6


def test_quantising_twice_is_refused() -> None:
    trainer, _ = make_pair("fp8")
    with pytest.raises(QuantisationError, match="quantised already: fp8"):
        quantised(quantised(trainer.weights(), "fp8"), "fp8")
    assert quantised(trainer.weights(), "none").manifest().quantisation == "none"
