"""Trainer to engine through the transaction: what the receipt claims holds, and no failure passes for success.

Every test that shows a refit working has a twin in which the refit is left out and the same assertion fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from lockstep.config.schema import RolloutConfig, TrainerConfig
from lockstep.interfaces import WeightReceiver
from lockstep.numerics.row_sums import tensor_digest
from lockstep.records import Claim, LiveTensor, Manifest, Sequence
from lockstep.refit import transaction
from lockstep.refit.probes import OtherWeights
from lockstep.refit.transaction import Receipt, RefitError, run_refit
from lockstep.refit.transports import make_transport
from lockstep.refit.verify import claim_covered, claim_loaded
from lockstep.rollout.torch_engine import EngineUnfit, TorchEngine
from lockstep.train.fsdp import FsdpTrainer
from tests.contract.engine_models import tiny_model

ARCHITECTURES = ("llama", "qwen3_moe", "deepseek_v3", "deepseek_v4")


def make_pair(architecture: str) -> tuple[FsdpTrainer, TorchEngine]:
    """A trainer and an engine that hold different weights."""
    config = TrainerConfig(dtype="float32", learning_rate=1e-3)
    trainer = FsdpTrainer(tiny_model(architecture, seed=2), config, total_optimizer_steps=1, temperature=1.0)
    return trainer, TorchEngine(tiny_model(architecture, seed=1), RolloutConfig(dtype="float32", num_slots=4))


def probe(length: int = 40) -> Sequence:
    tokens = np.random.default_rng(0).integers(3, 90, length).astype(np.int32)
    mask = np.arange(length) >= 4
    zeros = np.zeros(length, np.int32)
    return Sequence("probe", tokens, mask, np.zeros(length, np.float32), zeros, zeros)


def largest_difference(trainer: FsdpTrainer, engine: TorchEngine, path: Any) -> float:
    sequence = probe()
    ours = trainer.logprobs([sequence])["probe"].logprobs[sequence.loss_mask]
    theirs = engine.score([sequence], path)["probe"].logprobs[sequence.loss_mask]
    assert np.isfinite(ours).all()
    assert np.isfinite(theirs).all()
    return float(np.abs(ours - theirs).max())


def refit(trainer: FsdpTrainer, engine: TorchEngine, transport: str = "local", **options: Any) -> Receipt:
    return run_refit(trainer.weights(), engine.receiver(), make_transport(transport), verify=True, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("transport", ["local", "shared"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_trainer_and_engine_agree_after_a_refit_and_not_before(architecture: str, transport: str) -> None:
    trainer, engine = make_pair(architecture)
    for path in ("prefill", "decode"):
        assert largest_difference(trainer, engine, path) > 1e-2, "without a refit this test must fail"
    receipt = refit(trainer, engine, transport)
    for path in ("prefill", "decode"):
        assert largest_difference(trainer, engine, path) < 1e-5
    claims = {claim.name: claim.status for claim in receipt.claims}
    assert claims == {
        "covered": "held",
        "transported": "not checked",
        "loaded": "held",
        "derived": "not checked",
        "behaves": "not checked",
    }
    assert engine.version == trainer.version == receipt.version
    assert receipt.transport == transport
    assert (receipt.transferred_bytes > 0) == (transport == "local")


def test_a_receipt_has_the_seconds_of_each_phase_and_the_rate_of_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, engine = make_pair("llama")
    now, resumed = [100.0], []
    monkeypatch.setattr(transaction.time, "perf_counter", lambda: now[0])

    class Slow(_Faulty):
        def begin(self, manifest: Manifest) -> None:
            now[0] += 1.0
            self.inner.begin(manifest)

        def receive(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            now[0] += 4.0
            self.inner.receive(tensors)

        def commit(self) -> Any:
            now[0] += 16.0
            return self.inner.commit()

        def live(self) -> Any:
            now[0] += 32.0
            return self.inner.live()

        def resume(self) -> None:
            resumed.append(True)
            self.inner.resume()

    seen = Claim("behaves", "held", "probes were scored")
    receiver = cast(WeightReceiver, Slow(engine.receiver(), ""))
    receipt = run_refit(trainer.weights(), receiver, make_transport("local"), verify=True, behaves=lambda: seen)  # pyright: ignore[reportArgumentType]
    assert resumed == [True]
    assert seen in receipt.claims
    assert receipt.num_tensors == len(trainer.weights().manifest().tensors)
    assert (receipt.begin_s, receipt.transfer_s, receipt.commit_s) == (1.0, 4.0, 16.0)
    assert receipt.verify_s > 0
    assert receipt.verify_s % 32.0 == 0
    num_bytes = sum(tensor.nbytes for _, _, _, tensor in trainer.weights().shards())
    assert receipt.transferred_bytes == num_bytes
    assert receipt.as_dict()["transfer_bytes_per_s"] == num_bytes / 4.0
    unchecked = run_refit(trainer.weights(), receiver, make_transport("shared"), verify=False)  # pyright: ignore[reportArgumentType]
    assert {claim.status for claim in unchecked.claims} == {"not checked"}
    assert unchecked.verify_s == 0.0
    assert "transfer_bytes_per_s" not in unchecked.as_dict()


class _Faulty:
    """A receiver that mistreats what it is given."""

    def __init__(self, inner: WeightReceiver, fault: str) -> None:
        self.inner, self.fault = inner, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def receive(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.inner.receive(self._mistreated(list(tensors)))

    def _mistreated(self, tensors: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, tensor) in enumerate(tensors):
            if index == 3 and self.fault == "drop":
                continue
            if index == 3 and self.fault == "die":
                raise ConnectionError("peer is gone")
            if index == 3 and self.fault == "truncate":
                yield name, tensor[:1]
            elif index == 3 and self.fault == "one bit":
                changed = tensor.clone()
                changed.view(torch.int32).view(-1)[0] ^= 1
                yield name, changed
            elif index == 3 and self.fault == "double":
                yield name, tensor
                yield name, tensor
            else:
                yield name, tensor


@pytest.mark.parametrize("fault", ["drop", "die", "truncate", "one bit", "double"])
def test_a_faulty_transfer_is_named_and_the_engine_serves_nothing(fault: str) -> None:
    trainer, engine = make_pair("llama")
    broken = tuple(spec.name for spec in trainer.weights().manifest().tensors)[3]
    with pytest.raises(RefitError) as caught:
        run_refit(trainer.weights(), _Faulty(engine.receiver(), fault), make_transport("local"), verify=True)  # pyright: ignore[reportArgumentType]
    assert ("peer is gone" if fault == "die" else broken) in str(caught.value)
    with pytest.raises(EngineUnfit):
        engine.score([probe()])
    refit(trainer, engine)
    assert largest_difference(trainer, engine, "decode") < 1e-5


@pytest.mark.parametrize("fault", ["die", "one bit"])
def test_an_abort_that_fails_too_does_not_hide_the_cause(fault: str) -> None:
    trainer, engine = make_pair("llama")
    faulty: Any = _Faulty(engine.receiver(), fault)

    def abort(reason: str) -> None:
        engine.receiver().abort(reason)
        raise ValueError("nor can it be put back")

    faulty.abort = abort
    with pytest.raises(RefitError, match="peer is gone" if fault == "die" else "a claim failed: loaded") as caught:
        run_refit(trainer.weights(), faulty, make_transport("local"), verify=True)
    assert str(caught.value).endswith("; the engine's abort failed as well: ValueError: nor can it be put back")
    with pytest.raises(EngineUnfit):
        engine.score([probe()])


class _Renamed:
    """A source whose manifest has one name wrong."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def manifest(self) -> Manifest:
        manifest = self.inner.manifest()
        first, *rest = manifest.tensors
        return Manifest(manifest.version, (type(first)(**{**_fields(first), "name": "no.such.weight"}), *rest))

    def shards(self) -> Any:
        return self.inner.shards()


def _fields(spec: Any) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def test_a_refused_manifest_leaves_the_engine_as_it_was() -> None:
    trainer, engine = make_pair("qwen3_moe")
    before = engine.score([probe()])["probe"].logprobs
    with pytest.raises(RefitError, match=r"no\.such\.weight"):
        run_refit(_Renamed(trainer.weights()), engine.receiver(), make_transport("local"), verify=True)
    np.testing.assert_array_equal(engine.score([probe()])["probe"].logprobs, before)
    assert engine.version == 0


class _Shows:
    """A receiver that shows other live tensors than it has."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()

    def opaque(self) -> dict[str, str]:
        return {}

    def reload_differences(self, tensors: object) -> Iterator[tuple[str, str | None]]:
        return iter(())


class _ShowsAfar(_Shows):
    """The same of an engine in another process, which describes them where they lie."""

    def described(self, key: int | None) -> Iterator[LiveTensor]:
        for name, tensor in self.tensors.items():
            digest = None if key is None else tensor_digest(tensor, key)
            yield LiveTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest)


@pytest.mark.parametrize("shows", [_Shows, _ShowsAfar])
def test_claims_fail_on_what_they_claim(shows: type[_Shows]) -> None:
    trainer, engine = make_pair("llama")
    refit(trainer, engine)
    source, manifest = trainer.weights(), trainer.weights().manifest()
    live = {name: tensor.clone() for name, tensor in engine.receiver().live()}
    name = manifest.tensors[2].name

    def statuses(tensors: dict[str, torch.Tensor]) -> tuple[str, str]:
        shown: Any = shows(tensors)
        return claim_covered(manifest, shown).status, claim_loaded(manifest, source, shown).status

    assert statuses(live) == ("held", "held")
    assert statuses({key: tensor for key, tensor in live.items() if key != name})[0] == "failed"
    assert statuses({**live, "left.over": live[name]}) == ("failed", "failed")
    negative_zero = {**live, name: torch.where(live[name] == 0, -live[name], live[name])}
    negative_zero[name].view(-1)[0] += 1e-3
    assert statuses(negative_zero)[1] == "failed"
    assert statuses({**live, name: live[name][:1]})[1] == "failed"
    for value in (0.0, float("nan")):
        one_off = live[name].clone()
        one_off.view(-1)[-1] = value
        claim = claim_loaded(manifest, source, cast(Any, shows({**live, name: one_off})))
        assert f"{name}: 1 of {one_off.numel()} values differ" in claim.detail
    assert statuses({})[1] == "failed"


@pytest.mark.parametrize("shows", [_Shows, _ShowsAfar])
def test_a_stale_tied_head_fails_the_loaded_claim(shows: type[_Shows]) -> None:
    trainer, engine = make_pair("llama")
    manifest = trainer.weights().manifest()
    assert manifest.tied, "this architecture must tie its head for the test to mean anything"
    refit(trainer, engine)
    live = dict(engine.receiver().live())
    tied = next(iter(manifest.tied))
    shown: Any = shows({**live, tied: torch.zeros_like(live[manifest.tied[tied]])})
    claim = claim_loaded(manifest, trainer.weights(), shown)
    assert claim.status == "failed"
    assert tied in claim.detail


def test_a_copy_after_sharing_leaves_the_trainers_weights_alone() -> None:
    trainer, engine = make_pair("llama")
    refit(trainer, engine, "shared")
    before = {name: tensor.clone() for name, _, _, tensor in trainer.weights().shards()}
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.receiver().live() if name in before)
    receipt = run_refit(OtherWeights(trainer.weights()), engine.receiver(), make_transport("local"), verify=True)
    assert not receipt.failed
    assert all(torch.equal(tensor, before[name]) for name, _, _, tensor in trainer.weights().shards())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in engine.receiver().live() if name in before)
