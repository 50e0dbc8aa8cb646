"""What a run that the gate stopped leaves for the search of the cause, and building both sides from it again.

At a stop the optimizer has not moved: the trainer's weights are those that sampled the batch. They are saved, and so is
every tensor that the engine computed with and that differs from the trainer's (``engine/step-N.safetensors``; none if
there is no difference). With the batch itself that is all that re-scoring needs.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lockstep.config.gate_checks import bounds_for, fitting_bounds
from lockstep.config.load import load_run_config
from lockstep.config.schema import BoundConfig, GateConfig, RunConfig
from lockstep.driver.assembly import Parts, assembled
from lockstep.driver.engines import build_engine, close_engine
from lockstep.driver.environment import launched
from lockstep.driver.folder import TRAINER, no_recipe, save_checkpoint
from lockstep.driver.progress import Progress
from lockstep.driver.scoring import optimizer_parts, score_models
from lockstep.driver.supervised import run_supervised
from lockstep.hardware.profile import choose, detect
from lockstep.interfaces import LogProbs, Task
from lockstep.metrics.checkpoints import verify
from lockstep.metrics.run_folder import CONFIG, METRICS, ROLLOUTS, RunFolder, read_rollouts, rollout_steps
from lockstep.metrics.sinks import read_jsonl
from lockstep.model.load import load_model, load_tokenizer, torch_dtype
from lockstep.model.weights import ModelWeights
from lockstep.parity.plan import Updated
from lockstep.parity.replay import Bench, Recorded, Setting, served_differences
from lockstep.refit.names import named_for
from lockstep.refit.probes import OtherWeights
from lockstep.refit.transaction import run_refit
from lockstep.refit.transports import make_transport
from lockstep.tasks.build import build_task
from lockstep.tasks.prompt import PromptRenderer
from lockstep.train.fsdp import FsdpTrainer

logger = logging.getLogger(__name__)

ENGINE = "engine"
Say = Callable[[str], None]


class ReplayError(Exception):
    """A recorded batch that can't be scored again; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A batch with both of its sides. ``exact``: the weights are those of the version that sampled it; ``note`` says
    which weights they are; ``bounds`` are those of the gate that fit the run. ``updated`` scores the batch by the
    trainer after an optimizer step on it, once and last (it may move the bench's weights); None: there is none."""

    bench: Bench
    config: RunConfig
    step: int
    exact: bool
    note: str
    bounds: tuple[BoundConfig, ...]
    updated: Updated | None = None


def keep_evidence(parts: Parts, folder: RunFolder, progress: Progress) -> None:
    """At a stop by the gate: save the weights of the version that sampled, and the engine's where they differ."""
    latest = folder.latest_checkpoint()
    if latest is None or latest[0] < progress.step:
        save_checkpoint(folder, parts, progress)
    served = _kept_differences(parts)
    file = _engine_file(folder.path, progress.step + 1)
    file.unlink(missing_ok=True)
    if served:
        from safetensors.torch import save_file

        file.parent.mkdir(exist_ok=True)
        plain = {name: tensor.cpu().contiguous() for name, tensor in served.items()}
        save_file(plain, file, metadata={"batch": _batch_digest(folder.path, progress.step + 1)})


def _kept_differences(parts: Parts) -> dict[str, torch.Tensor]:
    """What the engine computed with and the trainer does not, under the trainer's names: those of an engine that goes
    by checkpoint names are kept where the two namings agree (all but expert stacks)."""
    source, receiver = parts.trainer.weights(), parts.engine.receiver()
    served = served_differences(named_for(source, receiver.naming), receiver)
    own = {spec.name for spec in source.manifest().tensors}
    if others := sorted(served.keys() - own):
        logger.warning("%d of the engine's tensors differ and can't be kept for a replay: %s", len(others), others[:5])
    return {name: tensor for name, tensor in served.items() if name in own}


def _engine_file(run_dir: Path, step: int) -> Path:
    return run_dir / ENGINE / f"step-{step:06d}.safetensors"


def _batch_digest(run_dir: Path, step: int) -> str:
    """Ties the engine's tensors to the batch they sampled: a resumed run may write that step anew."""
    return hashlib.sha256((run_dir / ROLLOUTS / f"step-{step:06d}.parquet").read_bytes()).hexdigest()


def _served(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    file = _engine_file(run_dir, step)
    if not file.exists():
        return {}
    with safe_open(file, framework="pt") as tensors:
        if (tensors.metadata() or {}).get("batch") != _batch_digest(run_dir, step):
            return {}
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - it is no mapping


# --- from a run folder ------------------------------------------------------------------------------------------------


def from_run(run_dir: Path, step: int | None = None, device: str | None = None, *, judged: bool = True) -> Evidence:
    """The batch of ``step`` (None: the last recorded one) with the run's weights at or before it. Without ``judged``
    there need be no bound for the device that it is scored on.

    Raises ReplayError if the batch, any weights or the device are missing, or no token of it can be compared.
    """
    config = load_run_config(str(run_dir / CONFIG), find_recipe=no_recipe).config
    steps = rollout_steps(run_dir)
    step = step if step is not None else max(steps, default=0)
    if step not in steps:
        there = f"recorded are {steps[0]} to {steps[-1]}" if steps else "it has none"
        raise ReplayError(f"{run_dir} has no recorded batch of step {step}; {there}")
    rows = read_rollouts(run_dir, step)
    recorded = [Recorded(row.rollout_id, row.sequence, row.train_logprobs) for row in rows]
    sampled = [int(v) for one in recorded for v in one.sequence.versions[one.sequence.loss_mask]]
    if not sampled:
        raise ReplayError(f"no token was sampled in step {step}")
    version = max(sampled)
    profile = detect()
    chosen = {choice.setting: choice for choice in choose(profile, config)}
    torch.set_num_threads(int(chosen["threads"].value))
    device = device or str(chosen["device"].value)
    if device == "cuda" and not profile.gpus:
        raise ReplayError(f"there is no GPU to score on: {profile.why_no_gpu}; parity replay takes --device cpu")
    bounds = bounds_for(config, device) if judged else fitting_bounds(config, device)
    bounds = tuple(_drift_limit(bound, run_dir, config.gate, step) or bound for bound in bounds)
    model, vocab_limit, at, note = _weights(run_dir, config, step, version, device)
    setting = Setting(config.rollout, config.trainer, trainer_temperature=config.rollout.temperature)
    bench = Bench(model, setting, recorded, version=version, vocab_limit=vocab_limit, served=_served(run_dir, step))
    updated = _checkpoint_scores(run_dir, config, step, bench, device)
    return Evidence(bench, config, step, at == version, note, bounds, updated)


def _drift_limit(bound: BoundConfig, run_dir: Path, gate: GateConfig, step: int) -> BoundConfig | None:
    """The limit that ``step`` exceeded where the gate found a drift of that metric, whose value is within its bound;
    None where it did not."""
    file = run_dir / METRICS
    rows = [row for row in (read_jsonl(file) if file.exists() else []) if f"agreement/{bound.metric}" in row]
    values = {row["step"]: float(str(row[f"agreement/{bound.metric}"])) for row in rows}
    verdicts = {row["step"]: (row["verdict/status"], row["agreement/metric"]) for row in rows}
    status, metric = verdicts.get(step, ("pass", ""))
    if status == "pass" or metric != bound.metric or not values[step] <= bound.bound or not gate.baseline_steps:
        return None
    limit = gate.drift_factor * median(list(values.values())[: gate.baseline_steps])
    if not 0 < limit < values[step]:
        return None
    return bound.model_copy(update={"bound": limit, "evidence": f"{gate.drift_factor:g} × the run's first steps"})


def _checkpoint_scores(run_dir: Path, config: RunConfig, step: int, bench: Bench, device: str) -> Updated | None:
    """The batch scored by the weights that its own step saved, if it did."""
    path = run_dir / "checkpoints" / f"step-{step:06d}"
    if not path.is_dir() or verify(path):
        return None

    def updated() -> Mapping[str, LogProbs]:
        model = load_model(config.model, torch_dtype(config.trainer.dtype), device, head_dtype=config.head_dtype)
        trainer = _loaded_trainer(config, model, bench.vocab_limit, path)
        return trainer.logprobs(bench.sequences)

    return updated


def _weights(run_dir: Path, config: RunConfig, step: int, version: int, device: str) -> tuple[Any, int, int, str]:
    """(trainer's module, vocabulary limit, version of its weights, which weights they are)."""
    found = _checkpoint_before(run_dir, step)
    tokenizer = load_tokenizer(config.model)
    model = load_model(config.model, torch_dtype(config.trainer.dtype), device, head_dtype=config.head_dtype)
    vocab_limit = min(len(tokenizer), model.get_input_embeddings().num_embeddings)  # pyright: ignore
    if found is None and version > 0:
        there = ", ".join(f"step {number}" for number in sorted(_checkpoint_steps(run_dir))) or "none"
        raise ReplayError(
            f"{run_dir} has no complete checkpoint before step {step}, and its batch was sampled at version {version}; "
            f"there: {there} (checkpoint.every and checkpoint.keep say which stay). Name a recorded step behind one of "
            "them, or step 1, whose weights are built again from the configuration; or give the recipe"
        )
    if found is None:
        if config.supervised.steps:
            _warm_up(config, model, tokenizer, vocab_limit)
        return model, vocab_limit, 0, "weights: version 0, built again from the configuration"
    checkpoint_step, path = found
    trainer = _loaded_trainer(config, model, vocab_limit, path)
    note = f"weights: version {trainer.version}, checkpoint of step {checkpoint_step}"
    if trainer.version != version:
        note += (
            f"; the batch was sampled at version {version}, which has no checkpoint: "
            "differences include what the optimizer moved in between"
        )
    return model, vocab_limit, trainer.version, note


def _loaded_trainer(config: RunConfig, model: Any, vocab_limit: int | None, checkpoint: Path) -> FsdpTrainer:
    trainer = FsdpTrainer(
        model, config.trainer, total_optimizer_steps=1, temperature=config.rollout.temperature, vocab_limit=vocab_limit
    )
    trainer.load(checkpoint / TRAINER)
    return trainer


def _checkpoint_before(run_dir: Path, step: int) -> tuple[int, Path] | None:
    """The newest complete checkpoint of a step before ``step``; nothing is written or tidied up."""
    for candidate in sorted((number for number in _checkpoint_steps(run_dir) if number < step), reverse=True):
        path = run_dir / "checkpoints" / f"step-{candidate:06d}"
        if not verify(path):
            return candidate, path
    return None


def _checkpoint_steps(run_dir: Path) -> list[int]:
    names = [entry.name.removeprefix("step-") for entry in (run_dir / "checkpoints").glob("step-*")]
    return [int(name) for name in names if name.isdigit()]


def _warm_up(config: RunConfig, model: Any, tokenizer: Any, vocab_limit: int) -> None:
    task: Task = build_task(config.task)
    try:
        run_supervised(config, model, task, PromptRenderer(tokenizer, config.prompt), tokenizer, vocab_limit)
    finally:
        task.close()


# --- from a recipe ----------------------------------------------------------------------------------------------------


@contextmanager
def from_recipe(config: RunConfig, say: Say) -> Iterator[Evidence]:
    """A batch sampled now, by an engine that is refitted twice before: from other weights, so that a tensor that does
    not arrive shows, and to the recipe's own. Nothing is written, and nothing is trained before ``updated`` is asked
    for."""
    with launched(config), assembled(config, say, warm_up=True) as parts:
        receiver = parts.engine.receiver()
        source = parts.trainer.weights()
        run_refit(OtherWeights(source), receiver, parts.transport, verify=False)
        run_refit(source, receiver, parts.transport, verify=False)
        rollouts = parts.sampler.sample(1, 0).rollouts
        sequences = [(r.rollout_id, s) for r in rollouts for s in r.sequences]
        trained = parts.trainer.logprobs([s for _, s in sequences])
        recorded = [Recorded(rollout_id, s, trained[s.sequence_id].logprobs) for rollout_id, s in sequences]
        setting = Setting(config.rollout, config.trainer, trainer_temperature=config.rollout.temperature)
        bench = Bench(
            parts.trainer.model,
            setting,
            recorded,
            version=parts.trainer.version,
            vocab_limit=parts.trainer.forward.head.vocab_limit,
            served=served_differences(source, receiver),
        )

        def updated() -> Mapping[str, LogProbs]:
            batches = optimizer_parts(parts, rollouts, score_models(parts, rollouts)).batches()
            if not batches:
                raise ReplayError("every group of this batch was dropped: there is nothing to take a step on")
            parts.trainer.forward_backward(batches[0], parts.objective)
            parts.trainer.optim_step()
            return parts.trainer.logprobs(bench.sequences)

        yield Evidence(bench, config, 0, True, "weights: the recipe's own, version 0", parts.gate.bounds, updated)


def vllm_scores(evidence: Evidence) -> tuple[dict[str, LogProbs], str]:
    """The recorded tokens' log-probs by a vLLM that is started here and refitted with the trainer's weights, and the
    refit's claims in words. Raises EngineUnavailable, with the way out, without vLLM."""
    bench, setting = evidence.bench, evidence.bench.setting
    plain = {"engine": "vllm", "process": "inline", "quantisation": "none", "fast_path": "auto"}
    rollout = setting.rollout.model_copy(update=plain)
    engine = build_engine(
        evidence.config.model_copy(update={"rollout": rollout}),
        bench.model,
        decode=lambda tokens: "",  # nothing is generated, so no text is looked at
        vocab_limit=bench.vocab_limit or bench.model.get_input_embeddings().num_embeddings,  # pyright: ignore
        max_prompt_tokens=max(len(sequence.tokens) for sequence in bench.sequences),
    )
    try:
        source = ModelWeights(bench.model, bench.version)
        receipt = run_refit(source, engine.receiver(), make_transport("local", evidence.config.refit), verify=True)
        claims = ", ".join(f"{claim.name} {claim.status}" for claim in receipt.claims)
        return engine.score(bench.sequences, path=setting.path), claims
    finally:
        close_engine(engine)


def with_options(evidence: Evidence, *, dtype: str | None = None, path: Any = None) -> Evidence:
    """The same with the engine in another dtype, or scoring by another path."""
    bench = evidence.bench
    rollout = bench.setting.rollout.model_copy(update={"dtype": dtype} if dtype else {})
    bench.setting = replace(bench.setting, rollout=rollout, path=path or bench.setting.path)
    return evidence
