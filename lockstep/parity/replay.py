"""Scoring recorded tokens again, on both sides and under changed settings, without the loop.

::

    trainer's model ─copy─▶ engine's module ─ served weights laid over it ─▶ TorchEngine ─ decode | prefill ─▶ l_roll
          └───────────────copy, dtype──────────────────────────────────────▶ the trainer's forward ──────────▶ l_train

A ``Setting`` says how: dtypes, decoder, path, packing, temperatures, which weights. ``Bench`` holds the weights and the
tokens. *Served* weights are those that an engine was found to compute with; *loaded* ones are the trainer's, in an
engine that was built from them and has seen no refit.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from lockstep.config.schema import RolloutConfig, TrainerConfig
from lockstep.interfaces import LogProbs, WeightReceiver, WeightSource
from lockstep.model.head import use_float32_head
from lockstep.model.load import torch_dtype
from lockstep.model.weights import ModelWeights
from lockstep.parity.attribute import Factor, Names, Scores
from lockstep.records import Sequence
from lockstep.refit.bisect import TOLERANCE, Difference, first_difference, recorded_outputs
from lockstep.refit.derived import equal_bits
from lockstep.refit.quantised import as_held, quantised_for, served_weights
from lockstep.refit.transports import whole_tensors
from lockstep.rollout.torch_engine import TorchEngine
from lockstep.train.forward import PolicyForward
from lockstep.train.routing_replay import RoutingReplayError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Path = Literal["decode", "prefill"]
OnModel = Callable[[Any], None]
OnEngine = Callable[[TorchEngine], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """How recorded tokens are scored. Factors change one field or more (``dataclasses.replace``).

    ``reload``: prefixes of tensor names that are taken from the trainer although the engine served others ("" is all).
    ``buffers``: layout buffers that never travel (rotary tables) are the trainer's too. ``one_by_one``: the engine
    scores each sequence alone. ``environment``: variables set (None: removed) while both sides score. ``on_engine`` and
    ``on_trainer`` are called with the built engine and with the trainer's module before they score.
    """

    rollout: RolloutConfig
    trainer: TrainerConfig
    path: Path = "decode"
    trainer_temperature: float = 1.0
    reload: tuple[str, ...] = ()
    buffers: bool = False
    float32_head: bool = False
    one_by_one: bool = False
    environment: tuple[tuple[str, str | None], ...] = ()
    on_engine: tuple[OnEngine, ...] = ()
    on_trainer: tuple[OnModel, ...] = ()


@dataclass(frozen=True, slots=True)
class Recorded:
    """A sequence with the rollout that it belongs to and what the trainer computed in the run [T], if it is known."""

    rollout_id: str
    sequence: Sequence
    train_logprobs: np.ndarray | None = None


class Bench:
    """Both sides of one policy version, and a recorded batch.

    ``model``: the trainer's module, in the trainer's dtype; it is copied, never changed. ``served``: what the engine
    computed with where that differs from the trainer, by state-dict name (``served_differences``).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        setting: Setting,
        recorded: Seq[Recorded],
        *,
        version: int = 0,
        vocab_limit: int | None = None,
        served: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.model, self.setting, self.version, self.vocab_limit = model, setting, version, vocab_limit
        self.recorded = tuple(recorded)
        self.served = dict(served or {})
        self._trained: dict[object, dict[str, LogProbs]] = {}
        self._warm = False

    @property
    def sequences(self) -> list[Sequence]:
        """The recorded sequences in order."""
        return [one.sequence for one in self.recorded]

    @property
    def fresh(self) -> list[Sequence]:
        """The same, counting only tokens that were sampled and cached at this bench's version; others are stale."""
        version = self.version
        masks = [s.loss_mask & (s.versions == version) & (s.kv_versions == version) for s in self.sequences]
        return [replace(s, loss_mask=mask) for s, mask in zip(self.sequences, masks, strict=True)]

    @property
    def rollout_ids(self) -> list[str]:
        """The rollout of each recorded sequence."""
        return [one.rollout_id for one in self.recorded]

    # --- both sides ---------------------------------------------------------------------------------------------------

    def engine(self, setting: Setting) -> TorchEngine:
        """A new engine as ``setting`` describes it."""
        model = self._serving(setting).to(dtype=torch_dtype(setting.rollout.dtype))  # pyright: ignore[reportCallIssue]
        if setting.float32_head:
            use_float32_head(model)
        engine = TorchEngine(model, setting.rollout, vocab_limit=self.vocab_limit, version=self.version)
        if setting.buffers:
            _copy_layout_buffers(self.model, model)
        for change in setting.on_engine:
            change(engine)
        return engine

    def _serving(self, setting: Setting) -> PreTrainedModel:
        """A copy of the trainer's module with the weights that the engine served; those that a refit brought rightly
        are quantised as the engine's are."""
        model = copy.deepcopy(self.model)
        own = dict(model.state_dict(keep_vars=True))
        if setting.rollout.quantisation != "none":
            arriving = served_weights(ModelWeights(self.model, self.version), setting.rollout.quantisation)
            for name, tensor in whole_tensors(arriving):
                own[name].data.copy_(tensor)
        for name, tensor in self.served.items():
            if not name.startswith(setting.reload):
                _overlay(model, own, name, tensor)
        return model

    def first_difference(self) -> Difference | None:
        """The first module whose output on the longest recorded sequence is another with the weights that were served;
        both sides in float32, so that rounding does not show. None if none is, or if the served weights are the
        trainer's."""
        if not self.served:
            return None
        tokens = max(self.sequences, key=lambda sequence: len(sequence.tokens)).tokens
        sides = []
        for model in (self._serving(self.setting), copy.deepcopy(self.model)):
            model = model.float()
            ids = torch.from_numpy(tokens.astype(np.int64))[None].to(model.device)
            with torch.no_grad(), recorded_outputs(model) as outputs:
                model(input_ids=ids, use_cache=False)
            sides.append(outputs)
        return first_difference(*sides, tolerance=TOLERANCE["float32"])

    def engine_scores(self, setting: Setting) -> tuple[dict[str, LogProbs], float]:
        """The engine's log-probs of the recorded tokens, and the seconds of the scoring alone."""
        with _environment(setting.environment):
            engine = self.engine(setting)
            groups = [[one] for one in self.sequences] if setting.one_by_one else [self.sequences]
            if not self._warm:  # a first call pays for what later ones find ready, and would spoil their prices
                engine.score(groups[0][:1], path=setting.path)
                self._warm = True
            start = time.perf_counter()
            found: dict[str, LogProbs] = {}
            for group in groups:
                found |= engine.score(group, path=setting.path)
            return found, time.perf_counter() - start

    def trainer_scores(self, setting: Setting, engine: Mapping[str, LogProbs] | None = None) -> dict[str, LogProbs]:
        """The trainer's log-probs of the recorded tokens; equal settings of the trainer's side are scored once.

        With routing replay the experts are those that ``engine`` chose in this scoring; without it, the recorded ones.
        """
        sequences = self.sequences
        if setting.trainer.routing_replay and engine is not None:
            sequences = [replace(s, routes=engine[s.sequence_id].routes) for s in sequences]
        key = (
            setting.trainer,
            setting.trainer_temperature,
            setting.float32_head,
            setting.environment,
            setting.on_trainer,
        )
        if key not in self._trained or setting.trainer.routing_replay:
            config, model = setting.trainer, self.model
            if model.dtype != torch_dtype(config.dtype) or setting.float32_head or setting.on_trainer:
                model = copy.deepcopy(model).to(dtype=torch_dtype(config.dtype))  # pyright: ignore[reportCallIssue]
            if setting.float32_head:
                use_float32_head(model)
            for change in setting.on_trainer:
                change(model)
            with _environment(setting.environment):
                forward = PolicyForward(
                    model,
                    temperature=setting.trainer_temperature,
                    vocab_limit=self.vocab_limit,
                    micro_batch_tokens=config.micro_batch_tokens,
                    chunk_tokens=config.logprob_chunk_tokens,
                    packing=config.packing,
                    routing_replay=config.routing_replay,
                )
                self._trained[key] = forward.score(sequences, self.version)
        return self._trained[key]

    # --- for attribute ------------------------------------------------------------------------------------------------

    def scores(self, setting: Setting) -> Scores:
        """Both sides under ``setting``. Expert ids that the trainer refuses to replay are a refusal, not an error."""
        engine, seconds = self.engine_scores(setting)
        try:
            trained = self.trainer_scores(setting, engine)
        except RoutingReplayError as error:
            return Scores((), refused=str(error))
        pairs = [(trained[s.sequence_id].logprobs, engine[s.sequence_id].logprobs) for s in self.sequences]
        return self.compared(pairs, seconds)

    def compared(self, pairs: Seq[tuple[np.ndarray | None, np.ndarray]], seconds: float = 0.0) -> Scores:
        """(l_train, l_roll) [T] of every recorded sequence as the scores of its eligible tokens, by rollout; sequences
        without l_train are left out.

        Raises ValueError if no token was sampled and cached at this bench's version.
        """
        by_rollout: dict[str, list[np.ndarray]] = {}
        nonfinite = eligible_tokens = 0
        for one, (train, rollout) in zip(self.recorded, pairs, strict=True):
            if train is None:
                continue
            s = one.sequence
            eligible = s.loss_mask & (s.versions == self.version) & (s.kv_versions == self.version)
            d = train[eligible].astype(np.float64) - rollout[eligible]
            nonfinite += int((~np.isfinite(d)).sum())
            eligible_tokens += len(d)
            by_rollout.setdefault(one.rollout_id, []).append(d[np.isfinite(d)])
        if not eligible_tokens:
            found = sorted({int(v) for s in self.sequences for v in s.versions[s.loss_mask]})
            raise ValueError(f"no recorded token is of version {self.version}; they are of versions {found}")
        differences = tuple(np.concatenate(pieces) for pieces in by_rollout.values())
        return Scores(differences, nonfinite, seconds, eligible_tokens)

    def as_recorded(self) -> Scores | None:
        """The difference that the run itself saw, in the sequences that its trainer scored; None if it scored none."""
        known = any(one.train_logprobs is not None and one.sequence.loss_mask.any() for one in self.recorded)
        return self.compared([(one.train_logprobs, one.sequence.logprobs) for one in self.recorded]) if known else None

    def evaluator(self, factors: Seq[Factor]) -> Callable[[Names], Scores]:
        """What ``attribute`` calls: the changes of the named factors in their order, then both sides."""
        every = [*factors, *(part for factor in factors for part in factor.parts)]

        def evaluate(names: Names) -> Scores:
            setting = self.setting
            for factor in every:
                if factor.name in names and factor.change is not None:
                    setting = factor.change(setting)
            return self.scores(setting)

        return evaluate


def served_differences(source: WeightSource, receiver: WeightReceiver) -> dict[str, torch.Tensor]:
    """Live tensors of an engine whose bits are not those that a refit from ``source`` brings (converted to the engine's
    dtype, and quantised and dequantised if the engine is), copied.

    A tied name counts where the engine keeps a layout of its own for it.
    """
    arriving = as_held(quantised_for(source, receiver.quantisation), receiver)
    wanted, tied = dict(whole_tensors(arriving)), source.manifest().tied
    found: dict[str, torch.Tensor] = {}
    for name, live in receiver.live():
        sent = wanted.get(name, wanted.get(tied.get(name, "")))
        if sent is None or not equal_bits(sent.to(live.device, live.dtype), live):
            found[name] = live.detach().clone()
    return found


def _overlay(model: torch.nn.Module, own: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    """Put a served tensor in place of the module's; one of several tied names is untied first."""
    if name not in own or own[name].shape != tensor.shape:
        raise ValueError(f"served tensor {name} {tuple(tensor.shape)} does not fit this model")
    target = own[name]
    shared = [other for other, t in own.items() if other != name and t.data_ptr() == target.data_ptr() and t.numel()]
    if shared:
        owner, _, attribute = name.rpartition(".")
        untied = torch.nn.Parameter(tensor.to(target.device, target.dtype), requires_grad=False)
        setattr(model.get_submodule(owner), attribute, untied)
        return
    with torch.no_grad():
        target.copy_(tensor)


def _copy_layout_buffers(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Buffers that no checkpoint holds, which a refit therefore never sends."""
    persistent = set(source.state_dict())
    own = dict(target.named_buffers())
    for name, buffer in source.named_buffers():
        if name not in persistent and name in own:
            own[name].copy_(buffer)


@contextmanager
def _environment(changes: Seq[tuple[str, str | None]]) -> Iterator[None]:
    """Set or remove environment variables while the block runs."""
    before = {name: os.environ.get(name) for name, _ in changes}
    try:
        for name, value in changes:
            _set_variable(name, value)
        yield
    finally:
        for name, value in before.items():
            _set_variable(name, value)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
