"""Planted faults, found by name: each is planted from outside by wrapping or patching, among factors that do nothing.

The models are tiny and random; a batch is 12 rollouts of made-up tokens. What a fault needs to be found is a factor
that takes its cause away; where none of the named factors does, the answer must be *unexplained*.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lockstep.config.schema import RolloutConfig, TrainerConfig
from lockstep.interfaces import LogProbs
from lockstep.model.head import Float32Head, use_float32_head
from lockstep.model.weights import ModelWeights
from lockstep.parity.attribute import Attribution, Factor, attribute, sentence
from lockstep.parity.factors import FLOAT32_HEAD, builtin_factors, choose_factors, environment_factor
from lockstep.parity.replay import Bench, Recorded, Setting, served_differences
from lockstep.records import Sequence
from lockstep.refit.transaction import run_refit
from lockstep.refit.transports import LocalTransport
from lockstep.rollout import fast_decoder, scoring, torch_engine
from lockstep.rollout.fast_decoder import FastDecoder
from lockstep.rollout.module_decoder import ModuleDecoder
from lockstep.rollout.packed_linear import Float32Linear, FusedLinear, packing_works
from lockstep.rollout.receiver import TorchReceiver
from lockstep.rollout.torch_engine import TorchEngine
from lockstep.train.forward import PolicyForward
from tests.contract.engine_models import tiny_model

BOUND = 1e-3
Patch = pytest.MonkeyPatch

DECOYS = [
    environment_factor("LOCKSTEP_READ_BY_NOTHING", "1"),
    Factor("slots", "fewer slots", lambda s: replace(s, rollout=s.rollout.model_copy(update={"num_slots": 3}))),
    Factor(
        "chunks",
        "smaller chunks of logits",
        lambda s: replace(s, trainer=s.trainer.model_copy(update={"logprob_chunk_tokens": 16})),
    ),
]


def batch(seed: int = 0, num: int = 12) -> list[Recorded]:
    rng = np.random.default_rng(seed)
    recorded = []
    for index in range(num):
        prompt, length = int(rng.integers(4, 9)), int(rng.integers(8, 14))
        total = prompt + length
        mask = np.arange(total) >= prompt
        versions = np.where(mask, 0, -1).astype(np.int32)
        tokens = rng.integers(5, 95, size=total).astype(np.int32)
        sequence = Sequence(f"s{index}", tokens, mask, np.zeros(total, np.float32), versions, versions)
        recorded.append(Recorded(f"r{index}", sequence))
    return recorded


def make_bench(
    architecture: str = "llama",
    *,
    model: Any = None,
    served: Any = None,
    path: Any = "decode",
    dtype: str = "float32",
    temperature: float = 1.0,
    recorded: list[Recorded] | None = None,
    **rollout: Any,
) -> Bench:
    setting = Setting(
        rollout=RolloutConfig(temperature=temperature, dtype=dtype, **rollout),  # pyright: ignore[reportArgumentType]
        trainer=TrainerConfig(dtype=dtype),  # pyright: ignore[reportArgumentType]
        path=path,
        trainer_temperature=temperature,
    )
    model = model or tiny_model(architecture, dtype=getattr(torch, dtype))
    return Bench(model, setting, recorded or batch(), served=served)


@dataclass
class Case:
    """A bench with a fault, the factors that are named beside the built-in ones and the decoys, and the answer:
    minimal sets (none: unexplained) and, for a factor with parts, the parts."""

    bench: Bench
    expected: list[set[str]]
    extra: list[Factor] = field(default_factory=list)
    parts: dict[str, set[str]] = field(default_factory=dict)
    bound: float = BOUND
    budget: int = 60


# --- faults -----------------------------------------------------------------------------------------------------------


def temperature_on_one_side(patch: Patch) -> Case:
    original = scoring.token_logprobs
    patch.setattr(scoring, "token_logprobs", lambda logits, targets, _temperature: original(logits, targets, 1.0))
    return Case(make_bench(temperature=0.6), [{"trainer-temperature-1"}])


def top_p_renormalised_on_one_side(patch: Patch) -> Case:
    """The engine divides by the kept mass; the switch is its sampling option."""
    kept = {"top_p": 1.0}
    original, score = scoring.token_logprobs, TorchEngine.score

    def token_logprobs(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> Any:
        logprobs, top1 = original(logits, targets, temperature)
        ordered = (logits.float() / temperature).softmax(-1).sort(descending=True).values
        before = ordered.cumsum(-1) - ordered
        mass = torch.where(before < kept["top_p"], ordered, 0.0).sum(-1)
        return logprobs - mass.log().numpy(), top1

    def scored(self: TorchEngine, *args: Any, **kwargs: Any) -> Any:
        kept["top_p"] = self.config.top_p
        return score(self, *args, **kwargs)

    patch.setattr(scoring, "token_logprobs", token_logprobs)
    patch.setattr(TorchEngine, "score", scored)
    off = Factor("top-p-off", "top_p 1", lambda s: replace(s, rollout=s.rollout.model_copy(update={"top_p": 1.0})))
    return Case(make_bench(top_p=0.8), [{"top-p-off"}], [off])


def head_in_bfloat16_on_one_side(patch: Patch) -> Case:
    class Bfloat16Head(torch.nn.Module):
        def __init__(self, head: Any) -> None:
            super().__init__()
            self.weight, self.bias = head.weight, None

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return F.linear(states.bfloat16(), self.weight.bfloat16())

    original = torch_engine.make_decoder

    def make_decoder(model: Any, *args: Any) -> Any:
        if not isinstance(model.lm_head, Float32Head):
            model.lm_head = Bfloat16Head(model.lm_head)
        return original(model, *args)

    patch.setattr(torch_engine, "make_decoder", make_decoder)
    return Case(make_bench("qwen3"), [{"float32-head"}], [FLOAT32_HEAD], bound=3e-4)


def refitted(
    patch: Patch, trainer: Any, fault: Callable[[Any, str, torch.Tensor], torch.Tensor], **options: Any
) -> Bench:
    """A live engine that held other weights and was refitted through a receiver that ``fault`` tampers with."""
    old = copy.deepcopy(trainer)
    with torch.no_grad():
        for parameter in old.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)) * 0.03)
    engine = TorchEngine(old, RolloutConfig(dtype=str(trainer.dtype).removeprefix("torch.")))  # pyright: ignore
    receive = TorchReceiver.receive

    def tampered(self: TorchReceiver, tensors: Any) -> None:
        live = {name: tensor.clone() for name, tensor in self.live()}
        receive(self, [(name, fault(live, name, tensor)) for name, tensor in tensors])

    source = ModelWeights(trainer, 0)
    with patch.context() as planted:
        planted.setattr(TorchReceiver, "receive", tampered)
        run_refit(source, engine.receiver(), LocalTransport(), verify=False)
    return make_bench(model=trainer, served=served_differences(source, engine.receiver()), **options)


def stale_layer(patch: Patch, **options: Any) -> Bench:
    model = tiny_model("qwen3", num_hidden_layers=6)
    return refitted(patch, model, lambda live, name, new: live[name] if ".layers.4." in name else new, **options)


def layer_stale_after_refit(patch: Patch) -> Case:
    return Case(stale_layer(patch), [{"load"}], parts={"load": {"load:model.layers.4"}})


def two_layers_stale_after_refit(patch: Patch) -> Case:
    model = tiny_model("qwen3", num_hidden_layers=6)
    stale = (".layers.1.", ".layers.5.")
    bench = refitted(patch, model, lambda live, name, new: live[name] if any(s in name for s in stale) else new)
    return Case(bench, [{"load"}], parts={"load": {"load:model.layers.1", "load:model.layers.5"}}, budget=80)


def experts_swapped(patch: Patch) -> Case:
    def swap(_live: Any, name: str, new: torch.Tensor) -> torch.Tensor:
        return new[[1, 0, *range(2, len(new))]] if "layers.0.mlp.experts.down_proj" in name else new

    return Case(refitted(patch, tiny_model("qwen3_moe"), swap), [{"load"}], parts={"load": {"load:model.layers.0"}})


def expert_map_frozen(patch: Patch) -> Case:
    """DeepSeek-V4's hash layers pick experts from a table; the engine keeps an old one."""
    model = tiny_model("deepseek_v4")
    tables = [name for name in model.state_dict() if name.endswith("tid2eid")]
    assert tables
    with_old = {name: table.roll(1, 0) for name, table in model.state_dict().items() if name == tables[0]}
    layer = "load:" + tables[0].split(".mlp")[0]
    return Case(make_bench(model=model, served=with_old, recorded=batch(num=5)), [{"load"}], parts={"load": {layer}})


def dequantised_copy_stale(patch: Patch) -> Case:
    """A copy in another precision (the head, widened to float32) is not made again at the refit."""
    patch.setattr(Float32Linear, "refresh", lambda self: None)
    model = tiny_model("llama", dtype=torch.bfloat16, initializer_range=0.15, tie_word_embeddings=False)
    use_float32_head(model)
    bench = refitted(patch, model, lambda _live, _name, new: new, dtype="bfloat16")
    assert set(bench.served) == {"lm_head.weight"}
    return Case(bench, [{"load"}], parts={"load": {"load:lm_head.weight"}}, bound=0.06)


def packed_copy_stale(patch: Patch) -> Case:
    """The weights of one layer are not packed again at the refit (where this machine packs at all)."""
    refresh = FusedLinear.refresh

    def skipping(self: FusedLinear) -> None:
        if self._packed is None or ".layers.1." not in self._names[0]:
            refresh(self)

    patch.setattr(FusedLinear, "refresh", skipping)
    model = tiny_model("llama", dtype=torch.bfloat16, initializer_range=0.15)
    bench = refitted(patch, model, lambda _live, _name, new: new, dtype="bfloat16")
    assert bench.served
    return Case(bench, [{"load"}], parts={"load": {"load:model.layers.1"}}, bound=0.06)


def rotary_base_wrong(patch: Patch) -> Case:
    original = torch_engine.make_decoder

    def make_decoder(model: Any, *args: Any) -> Any:
        rotary = model.model.rotary_emb
        size = rotary.inv_freq.numel()
        rotary.inv_freq.copy_(1.0 / 500.0 ** (torch.arange(size) / size))
        return original(model, *args)

    patch.setattr(torch_engine, "make_decoder", make_decoder)
    return Case(make_bench(), [{"buffers"}])


def rotary_table_in_bfloat16(patch: Patch) -> Case:
    """The engine's angles come from frequencies in bfloat16, the trainer's from float32 (radixark/miles#3268)."""
    original = torch_engine.make_decoder

    def make_decoder(model: Any, *args: Any) -> Any:
        frequencies = model.model.rotary_emb.inv_freq
        frequencies.copy_(frequencies.bfloat16())
        return original(model, *args)

    patch.setattr(torch_engine, "make_decoder", make_decoder)
    return Case(make_bench(), [{"buffers"}], bound=5e-5)  # of exact parity: float32 differs by 1e-7


def cache_read_in_the_other_fp8_dialect(patch: Patch) -> Case:
    """Keys and values are kept as e4m3fnuz, as gfx942 writes them, and read as e4m3fn (vllm-project/vllm#45562)."""
    place = fast_decoder.SlotState.place

    def misread(self: Any, prefilled: Any, slots: Any) -> None:
        kept = prefilled.cache.to(torch.float8_e4m3fnuz)
        place(self, replace(prefilled, cache=kept.view(torch.float8_e4m3fn).to(prefilled.cache.dtype)), slots)

    patch.setattr(fast_decoder.SlotState, "place", misread)
    return Case(make_bench(), [{"prefill"}, {"fast-path-off"}])


def left_padded_v4(patch: Patch) -> Case:
    """Prefill pads prompts at the left, which this architecture's compressors can't undo."""

    def padded(self: ModuleDecoder, sequences: Any, **options: Any) -> Any:
        longest = max(map(len, sequences))
        wide = [F.pad(sequence, (longest - len(sequence), 0)) for sequence in sequences]
        found = prefill(self, wide, **options)
        return [
            replace(
                one,
                hidden=one.hidden[longest - len(sequence) :],
                routes=None if one.routes is None else one.routes[longest - len(sequence) :],
            )
            for one, sequence in zip(found, sequences, strict=True)
        ]

    prefill = ModuleDecoder.prefill
    patch.setattr(ModuleDecoder, "prefill", padded)
    return Case(make_bench("deepseek_v4", path="prefill", recorded=batch(num=5)), [{"one-by-one"}])


def positions_off_by_one(patch: Patch) -> Case:
    """Decoding turns each token's query and key by the angle of the next position; prefill does not."""
    reserve = fast_decoder.SlotState._reserve

    def ahead(self: Any, num_positions: int) -> None:
        before = self._num_positions
        reserve(self, num_positions)
        if self._num_positions != before:
            self._cosines, self._sines = self._cosines.roll(-1, 0), self._sines.roll(-1, 0)

    patch.setattr(fast_decoder.SlotState, "_reserve", ahead)
    return Case(make_bench("qwen3"), [{"prefill"}, {"fast-path-off"}])


def logprobs_off_by_one(patch: Patch) -> Case:
    """The engine's log-prob of token t arrives at t + 1: nothing that is named here undoes that."""
    score = TorchEngine.score

    def shifted(self: TorchEngine, *args: Any, **kwargs: Any) -> dict[str, LogProbs]:
        return {k: replace(v, logprobs=np.roll(v.logprobs, 1)) for k, v in score(self, *args, **kwargs).items()}

    patch.setattr(TorchEngine, "score", shifted)
    return Case(make_bench(), [])


def retokenised(patch: Patch) -> Callable[..., Any]:
    """The engine gets the prompt decoded and encoded again: a pair of tokens has become one."""
    score = TorchEngine.score

    def encoded_again(self: TorchEngine, sequences: Any, path: Any = "prefill") -> dict[str, LogProbs]:
        merged = []
        for s in sequences:
            tokens = np.concatenate([s.tokens[:1], [(int(s.tokens[1]) + int(s.tokens[2])) % 90 + 5], s.tokens[3:]])
            arrays = (s.loss_mask[1:], s.logprobs[1:], s.versions[1:], s.kv_versions[1:])
            merged.append(Sequence(s.sequence_id, tokens.astype(np.int32), *arrays))
        found = score(self, merged, path)
        return {k: replace(v, logprobs=np.concatenate([[np.nan], v.logprobs])) for k, v in found.items()}

    patch.setattr(TorchEngine, "score", encoded_again)
    return score


def turns_retokenised(patch: Patch) -> Case:
    score = retokenised(patch)

    def as_sampled(engine: TorchEngine) -> None:
        engine.score = functools.partial(score, engine)  # pyright: ignore[reportAttributeAccessIssue]

    ids = Factor("token-ids", "ids as sampled", lambda s: replace(s, on_engine=(*s.on_engine, as_sampled)))
    return Case(make_bench("qwen3"), [{"token-ids"}], [ids])


def turns_retokenised_and_nobody_names_it(patch: Patch) -> Case:
    retokenised(patch)
    return Case(make_bench("qwen3"), [])


def prefix_cache_stale(patch: Patch) -> Case:
    """Prompts are served from a cache that a change of weights did not empty; it has an environment switch."""
    old = FastDecoder(tiny_model("llama", seed=1))
    prefill = FastDecoder.prefill

    def cached(self: FastDecoder, sequences: Any, **options: Any) -> Any:
        own = prefill(self, sequences, **options)
        if os.environ.get("PREFIX_CACHE", "1") == "0" or not options["keep_cache"]:
            return own
        return [replace(o, cache=c.cache) for o, c in zip(own, prefill(old, sequences, **options), strict=True)]

    patch.setattr(FastDecoder, "prefill", cached)
    off = environment_factor("PREFIX_CACHE", "0")
    # Without the cache at all there is nothing stale either: another decoder, or one prefill, restores it too.
    return Case(make_bench(), [{"prefill"}, {"fast-path-off"}, {"PREFIX_CACHE=0"}], [off])


def router_ties(patch: Patch) -> Case:
    """Four experts tie for every token, and the engine breaks ties from the other end."""
    model = tiny_model("qwen3_moe")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[1:4] = layer.mlp.gate.weight[0]
    flip = torch.tensor([3, 2, 1, 0, *range(4, 8)])
    original = torch_engine.make_decoder

    def other_end(_module: Any, _inputs: Any, output: Any) -> Any:
        return output[0], output[1], flip[output[2]]

    def make_decoder(model: Any, *args: Any) -> Any:
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(other_end)
        return original(model, *args)

    patch.setattr(torch_engine, "make_decoder", make_decoder)
    return Case(make_bench(model=model), [{"routing-replay"}])


def packed_sequences_see_each_other(patch: Patch) -> Case:
    allowed = PolicyForward._allowed

    def leaking(self: PolicyForward, micro: Any) -> torch.Tensor:
        return torch.ones_like(allowed(self, micro)).tril()

    patch.setattr(PolicyForward, "_allowed", leaking)
    return Case(make_bench(), [{"packing-single"}])


def two_faults_that_interact(patch: Patch) -> Case:
    temperature_on_one_side(patch)
    return Case(
        stale_layer(patch, temperature=0.6),
        [{"load", "trainer-temperature-1"}],
        parts={"load": {"load:model.layers.4"}},
        budget=80,
    )


def one_of_two_faults_is_not_named(patch: Patch) -> Case:
    logprobs_off_by_one(patch)
    return Case(stale_layer(patch), [])


FAULTS = [
    temperature_on_one_side,
    top_p_renormalised_on_one_side,
    head_in_bfloat16_on_one_side,
    layer_stale_after_refit,
    two_layers_stale_after_refit,
    experts_swapped,
    expert_map_frozen,
    dequantised_copy_stale,
    *([packed_copy_stale] if packing_works(torch.bfloat16) else []),
    rotary_base_wrong,
    rotary_table_in_bfloat16,
    cache_read_in_the_other_fp8_dialect,
    left_padded_v4,
    positions_off_by_one,
    logprobs_off_by_one,
    turns_retokenised,
    turns_retokenised_and_nobody_names_it,
    prefix_cache_stale,
    router_ties,
    packed_sequences_see_each_other,
    two_faults_that_interact,
    one_of_two_faults_is_not_named,
]


def found(case: Case) -> Attribution:
    factors = [*DECOYS[:1], *builtin_factors(case.bench), *case.extra, *DECOYS[1:]]
    return attribute(case.bench.evaluator(factors), factors, case.bound, case.budget)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_named_or_called_unexplained(plant: Callable[[Patch], Case], monkeypatch: Patch) -> None:
    case = plant(monkeypatch)
    result = found(case)
    text = f"{sentence(result)}\n" + "\n".join(f"{sorted(t.factors)} {t.value}" for t in result.trials)
    assert result.unchanged.value is not None
    assert result.unchanged.value > 2 * case.bound, f"the fault must be visible: {text}"
    assert {frozenset(names) for names in case.expected} == set(result.minimal), text
    assert result.status == ("explained" if case.expected else "unexplained"), text
    assert {name: set(parts) for name, parts in result.refined.items()} == case.parts, text
    for decoy in DECOYS:
        trial = result.trial(decoy.name)
        assert trial is not None
        assert trial.judgement == "noise", text


UNEXPLAINED = (logprobs_off_by_one, turns_retokenised_and_nobody_names_it, one_of_two_faults_is_not_named)


@pytest.mark.parametrize("plant", [p for p in FAULTS if p not in UNEXPLAINED], ids=lambda plant: plant.__name__)
def test_a_fault_whose_factor_is_not_named_is_unexplained(plant: Callable[[Patch], Case], monkeypatch: Patch) -> None:
    """Nothing else restores it, alone or together: the decoys and the factors of other causes can't be blamed."""
    case = plant(monkeypatch)
    guilty = set().union(*case.expected)
    assert guilty
    factors = [f for f in [*builtin_factors(case.bench), *case.extra, *DECOYS] if f.name not in guilty]
    result = attribute(case.bench.evaluator(factors), factors, case.bound, case.budget)
    assert (result.status, result.minimal) == ("unexplained", ()), sentence(result)
    assert "outside of them" in sentence(result)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "deepseek_v4"])
def test_without_a_fault_there_is_nothing_to_explain(architecture: str) -> None:
    result = found(Case(make_bench(architecture), []))
    assert result.status == "healthy"
    assert len(result.trials) == 1


def test_experts_that_the_trainer_may_not_replay_are_a_refusal_with_its_reason(monkeypatch: Patch) -> None:
    trial = found(expert_map_frozen(monkeypatch)).trial("routing-replay")
    assert trial is not None
    assert trial.judgement == "refused"
    assert "table" in trial.refused


def test_interacting_faults_are_told_as_such(monkeypatch: Patch) -> None:
    text = sentence(found(two_faults_that_interact(monkeypatch)))
    assert text.startswith("neither alone suffices")
    assert "load:model.layers.4 is enough" in text


def test_only_layers_that_were_served_otherwise_are_worth_a_run(monkeypatch: Patch) -> None:
    for bench, parts in ((stale_layer(monkeypatch), ["load:model.layers.4"]), (make_bench(), [])):
        load = next(factor for factor in builtin_factors(bench) if factor.name == "load")
        assert [part.name for part in load.parts] == parts


def test_factors_are_chosen_by_name_and_unknown_ones_are_refused() -> None:
    available = builtin_factors(make_bench())
    chosen = choose_factors(available, ["buffers", "FAST=0", "load"])
    assert [factor.name for factor in chosen] == ["buffers", "FAST=0", "load"]
    assert choose_factors(available, []) == available
    with pytest.raises(ValueError, match=r"no factor 'bufers'.*there are load,"):
        choose_factors(available, ["bufers"])


def test_a_factor_that_the_model_can_t_take_is_no_factor_of_its_run() -> None:
    """Its error ended the search: a head of several layers, routers without a proved rule of replay."""
    plain = {factor.name for factor in builtin_factors(make_bench("qwen3_moe", dtype="bfloat16"))}
    assert plain >= {"float32-head", "routing-replay"}
    odd = make_bench("gpt_oss", dtype="bfloat16")
    odd.model.lm_head = torch.nn.Sequential(odd.model.lm_head)
    assert plain - {factor.name for factor in builtin_factors(odd)} == {"float32-head", "routing-replay"}


def test_an_environment_variable_is_set_only_while_both_sides_score(monkeypatch: Patch) -> None:
    monkeypatch.delenv("SEEN_HERE", raising=False)
    seen: list[str | None] = []
    bench = make_bench()
    original = bench.engine
    monkeypatch.setattr(bench, "engine", lambda setting: seen.append(os.environ.get("SEEN_HERE")) or original(setting))
    factor = environment_factor("SEEN_HERE", "yes")
    bench.evaluator([factor])(frozenset({factor.name}))
    assert seen == ["yes"]
    assert "SEEN_HERE" not in os.environ


def test_tokens_of_another_version_are_not_compared() -> None:
    bench = Bench(make_bench().model, make_bench().setting, batch(), version=3)
    with pytest.raises(ValueError, match=r"no recorded token is of version 3; they are of versions \[0\]"):
        bench.scores(bench.setting)
