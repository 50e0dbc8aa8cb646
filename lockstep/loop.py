"""The loop, and the two commands that drive it: ``train`` (run or resume) and ``export``.

One step, and who waits for whom::

    task ─prompts─▶ engine ─completions─▶ task ─rewards─▶ advantages ─▶ trainer.forward_backward
                      ▲                                                     │ log-probs of that very forward
                      │                                                     ▼
                    refit ◀──────────── trainer.optim_step ◀──pass──  agreement ▶ gate ──stop──▶ exit 1

The gate judges before the optimizer moves. Spans name the phases; ``driver/`` holds what the phases are made of.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lockstep.config.load import ResolvedConfig
from lockstep.driver.assembly import Parts, assembled
from lockstep.driver.console import Console, heldout_text
from lockstep.driver.engines import engine_reads
from lockstep.driver.environment import Launch, launched
from lockstep.driver.evidence import keep_evidence
from lockstep.driver.export import export_checkpoint
from lockstep.driver.folder import TRAINER, Opened, default_run_dir, environment, open_run, save_checkpoint
from lockstep.driver.groups import SampledGroups
from lockstep.driver.idle import idleness
from lockstep.driver.interrupt import StopRequest, stop_on_signals
from lockstep.driver.needs import refuse_absent_hardware
from lockstep.driver.progress import Progress
from lockstep.driver.rows import (
    Row,
    duplicate_share,
    now_iso,
    optimizer_metrics,
    over_optimizer_steps,
    refit_metrics,
    rollout_metrics,
    time_metrics,
    unscored_counts,
)
from lockstep.driver.runnable import refuse_to_run
from lockstep.driver.scoring import ModelScores, optimizer_parts, score_models, self_agreement
from lockstep.hardware.cpu import peak_rss_bytes, return_freed_memory
from lockstep.metrics.checkpoints import CheckpointError
from lockstep.metrics.report import write_report
from lockstep.metrics.run_folder import CONFIG, TRACE, RunFolder
from lockstep.parity.gate import Verdict
from lockstep.parity.measure import judgeable, measure_step, token_context
from lockstep.parity.rows import agreement_row, token_details
from lockstep.records import FloatArray, RouteArray, TrainSequence
from lockstep.refit.behaves import Behaviour
from lockstep.refit.probes import OtherWeights
from lockstep.refit.transaction import Receipt, RefitError, run_refit
from lockstep.spans import Recorder, recording, span

logger = logging.getLogger(__name__)

EXIT_DONE, EXIT_GATE, EXIT_INTERRUPTED = 0, 1, 130


def run_sync(
    parts: Parts, folder: RunFolder, progress: Progress, console: Console, recorder: Recorder, stop: StopRequest
) -> Verdict | None:
    """Train until ``config.steps``, a stop request, or the gate; returns the verdict that stopped the run, if one did.

    ``progress`` is always the last *finished* step. Whatever raises, the trainer's weights are that step's as long as
    its version is ``progress.version``; ``stop`` is on hold from the optimizer's first move to the end of the save.
    """
    config = parts.config
    stopping = stop.requested
    recorder.take_totals()  # refits and an evaluation before the first step are not its time
    while progress.step < config.steps and not stopping:
        step = progress.step + 1
        with span("step"):
            with span("rollout"):
                sampled = parts.sampler.sample(step, progress.cursor)
            trained = train_on(parts, sampled, step, stop)
            row: Row = {"step": step, "time": now_iso(), **rollout_metrics(sampled.rollouts, "{}/mean")}
            row |= {"rollout/dropped_groups": sampled.num_dropped_groups, **duplicate_share(sampled.rollouts)}
            row |= {"rollout/dropped_unscored_groups": sampled.num_unscored_groups}
            row |= parts.sampler.prompt_counts() | unscored_counts(sampled.scores)
            row |= trained.metrics
            idle = None if trained.stopped else idleness(row, parts.algorithm)
            with span("record"):
                folder.write_rollouts(step, sampled.rollouts, trained.logprobs, console.token_texts(parts.decode))
                folder.append_agreement({"step": step} | trained.places)
            if not trained.stopped:
                row |= refit_metrics(refit(parts, folder, step))
                row |= {} if idle is None else {"idle/why": idle.why}
                progress.advance(step, parts.trainer.version, sampled.cursor, parts.gate.state(), idle)
                if (config.eval.every and step % config.eval.every == 0) or step == config.steps:
                    row |= evaluate(parts, step)
        return_freed_memory()
        totals = recorder.take_totals()
        row |= time_metrics(totals, sampled.num_sampled_tokens, trained.num_forward_tokens)
        folder.append_metrics(row | {"memory/peak_rss_bytes": peak_rss_bytes()})
        console.step(row, config.steps)
        if trained.stopped:
            keep_evidence(parts, folder, progress)
            return trained.verdict
        stopping = stop.requested  # read once: what stops the loop is what was saved
        if step % config.checkpoint.every == 0 or step == config.steps or stopping:
            save_checkpoint(folder, parts, progress)
            write_trace(recorder, folder)
        stop.release()
        progress.idle.refuse(idle, step, config.steps, config.algorithm)
    return None


@dataclass(slots=True)
class Trained:
    """What training on a batch yielded: log-probs and the trainer's expert ids by sequence id, metrics, and the
    verdict and the difference by place once they are there. ``items`` None: it did not come to that."""

    items: tuple[TrainSequence, ...] | None
    logprobs: dict[str, FloatArray]
    routes: dict[str, RouteArray]
    metrics: Row
    num_forward_tokens: int = 0
    verdict: Verdict | None = None
    places: dict[str, object] = field(default_factory=dict)

    @property
    def stopped(self) -> bool:
        """The gate stopped the run: the optimizer did not move."""
        return self.verdict is not None and self.verdict.status == "stop"


def train_on(parts: Parts, sampled: SampledGroups, step: int, stop: StopRequest) -> Trained:
    """Forward-backward, verdict, optimizer: once for each optimizer step of the batch.

    The agreement is of the policy that sampled, from the first forward (or, when several optimizer steps share the
    batch, from the pass before them), and of all sampled tokens, whatever is masked or rejected later.
    """
    objective, rollouts = parts.objective, sampled.rollouts
    scores = score_models(parts, rollouts)
    early = judge_unusable(parts, sampled, scores, step)
    if early is not None and early.stopped:
        return early
    prepared = optimizer_parts(parts, rollouts, scores)
    live = {key: scored.logprobs for key, scored in (scores.live or {}).items()}
    live_routes = {key: scored.routes for key, scored in (scores.live or {}).items() if scored.routes is not None}
    items = tuple(item for corrected in prepared.steps for item in corrected.items)
    trained = Trained(items, live, live_routes, dict(prepared.metrics))
    if early is not None:
        trained.verdict, trained.places = early.verdict, early.places
        trained.metrics.update(early.metrics)
    if step == 1:
        trained.metrics.update(self_agreement(parts, rollouts))
    by_step: list[dict[str, float]] = []
    for corrected, batch in zip(prepared.steps, prepared.batches(), strict=True):
        with span("train"):
            output = parts.trainer.forward_backward(batch, objective)
        by_step.append(corrected.metrics | output.metrics | {"loss": output.loss})
        trained.num_forward_tokens += output.num_forward_tokens
        if trained.verdict is None:
            if not trained.logprobs:
                trained.logprobs, trained.routes = output.logprobs, output.routes
            trained.verdict = judge(parts, sampled, trained, step)
            if trained.stopped:
                parts.trainer.drop_gradients()
                break
        stop.hold()
        with span("optim"):
            updated = parts.trainer.optim_step()
        by_step[-1] |= optimizer_metrics(updated)
    trained.metrics.update(over_optimizer_steps(by_step))
    if trained.verdict is None:  # nothing to train on: every group was dropped
        trained.verdict = judge(parts, sampled, trained, step)
    trained.metrics["version"] = parts.trainer.version
    return trained


def judge_unusable(parts: Parts, sampled: SampledGroups, scores: ModelScores, step: int) -> Trained | None:
    """The gate's verdict over log-probs of the trainer that are not finite, before anything is computed from them: KL
    in the reward, distillation and corrections need them earlier than the training forward. None: all are finite."""
    live = scores.live
    if live is None or all(
        np.isfinite(live[s.sequence_id].logprobs[s.loss_mask]).all() for r in sampled.rollouts for s in r.sequences
    ):
        return None
    trained = Trained(None, {key: scored.logprobs for key, scored in live.items()}, {}, {})
    trained.verdict = judge(parts, sampled, trained, step)
    trained.metrics["version"] = parts.trainer.version
    return trained


def judge(parts: Parts, sampled: SampledGroups, trained: Trained, step: int) -> Verdict:
    """Measure the agreement and judge it; its numbers go into the metrics of ``trained``.

    Only rollouts that the trainer has seen at the version that sampled them can be measured: all of them, unless
    several optimizer steps share a batch whose anchor is the engine's own log-probs. What is not finite on the engine's
    side counts all the same; how many tokens are left unseen is said.
    """
    with span("agreement"):
        seen, logprobs = judgeable(trained.logprobs, sampled.rollouts)
        unseen = sum(r.num_sampled_tokens for r in sampled.rollouts) - sum(r.num_sampled_tokens for r in seen)
        agreement = measure_step(
            logprobs, seen, parts.trainer.version, items=trained.items, train_routes=trained.routes
        )
        describe = token_context(seen, parts.decode)
        dropped = sampled.num_dropped_groups
        verdict = parts.gate.judge(agreement, step, describe, num_dropped_groups=dropped, num_unseen=unseen)
        trained.places = agreement_row(agreement, step, token_details(seen, parts.decode))
    trained.metrics.update(agreement.flat() | verdict.flat() | {"agreement/unseen": unseen})
    return verdict


def refit(parts: Parts, folder: RunFolder, step: int) -> Receipt:
    """Give the engine the trainer's weights and file the receipt. The first two of a process are verified, then those
    that are due."""
    parts.refit_steps.append(step)
    verify = len(parts.refit_steps) <= 2 or step % parts.config.refit.verify_every == 0
    with span("refit"):
        behaves = parts.proof.of_policy() if verify else None
        source, receiver = parts.trainer.weights(), parts.engine.receiver()
        with filed_if_refused(folder, {"step": step, "weights": "policy"}, behaves):
            receipt = run_refit(source, receiver, parts.transport, verify=verify, behaves=behaves)
    folder.append_refit({"step": step, "weights": "policy", **receipt.as_dict(), **probed(behaves)})
    return receipt


def refit_other(parts: Parts, folder: RunFolder, step: int) -> None:
    """Give the engine other weights than the policy's, once before the first refit of a process, and file the receipt:
    what does not arrive with the policy's weights then shows. Nothing is sampled from them."""
    if not parts.proof.possible:
        return
    other = OtherWeights(parts.trainer.weights())
    with span("refit"):
        behaves = parts.proof.of_other(other)
        with filed_if_refused(folder, {"step": step, "weights": "other"}, behaves):
            receipt = run_refit(other, parts.engine.receiver(), parts.transport, verify=True, behaves=behaves)
    folder.append_refit({"step": step, "weights": "other", **receipt.as_dict(), **probed(behaves)})


@contextmanager
def filed_if_refused(folder: RunFolder, what: dict[str, object], behaves: Behaviour | None) -> Iterator[None]:
    """A refit that fails is filed as well, with the claims that were looked at: it is the one that will be read."""
    try:
        yield
    except RefitError as error:
        found = {} if error.receipt is None else error.receipt.as_dict()
        folder.append_refit(what | {"error": str(error)} | found | probed(behaves))
        raise


def probed(behaves: Behaviour | None) -> dict[str, object]:
    """What the probes of a refit showed, for its receipt."""
    return {"probes": behaves.measured.as_dict()} if behaves is not None and behaves.measured is not None else {}


def evaluate(parts: Parts, step: int) -> Row:
    """Held-out problems, one greedy completion each."""
    with span("eval"):
        rollouts = parts.sampler.evaluate(parts.config.eval.num_problems, step)
    counts = unscored_counts([rollout.score for rollout in rollouts], "eval")
    return rollout_metrics(rollouts, "eval/{}") | counts | {"eval/problems": len(rollouts)}


def train(resolved: ResolvedConfig, run_dir: Path | None = None, *, as_json: bool = False) -> int:
    """Run a configuration, or resume the run in ``run_dir``. Returns the exit code: 0 done, 1 stopped by the gate,
    130 interrupted. Raises ConfigError, RunFolderError, TaskError and the like before anything is lost.
    """
    refuse_to_run(resolved.config)
    console = Console(as_json=as_json)
    with launched(resolved.config) as launch:
        return train_launched(resolved, run_dir, console, launch)


def train_launched(resolved: ResolvedConfig, run_dir: Path | None, console: Console, launch: Launch) -> int:
    """The same with the variables of the configuration in force."""
    config = resolved.config
    refuse_absent_hardware(config)
    opened = open_run(resolved, run_dir or default_run_dir(config))
    with opened.folder as folder, recording(Recorder()) as recorder, stop_on_signals(console.say) as stop:
        progress = opened.progress
        if progress.step >= config.steps:
            console.say(f"{folder.path}: finished at step {progress.step} of {config.steps}; nothing to do")
            return finish(folder, console)
        console.say(f"{config.name}: {config.description}\nrun folder: {folder.path}")
        with assembled(config, console.say, warm_up=opened.checkpoint is None) as parts:
            try:
                start(parts, opened, console)
                file_reads(folder, launch, parts)
                verdict = run_sync(parts, folder, progress, console, recorder, stop)
            except KeyboardInterrupt:
                last = save_finished(parts, opened, console)
                console.say(f"stopped at once; {last}; {how_to_resume(folder)}")
                return EXIT_INTERRUPTED
            except Exception:
                console.say(f"the run failed; {save_finished(parts, opened, console)}; {how_to_resume(folder)}")
                raise
            finally:
                write_trace(recorder, folder)
        if verdict is not None:
            step = progress.step + 1
            console.say(f"stopped by the gate at step {step}; its batch is kept in rollouts/step-{step:06d}.parquet")
            finish(folder, console)
            return EXIT_GATE
        if progress.step < config.steps:
            console.say(f"stopped after step {progress.step}; {last_saved(folder)}; {how_to_resume(folder)}")
            return EXIT_INTERRUPTED
        if closing := progress.idle.closing(progress.step):
            console.say(closing)
        return finish(folder, console)


def start(parts: Parts, opened: Opened, console: Console) -> None:
    """Load the checkpoint of a resumed run, give the engine its weights, and evaluate once before a fresh run."""
    folder, progress = opened.folder, opened.progress
    if opened.checkpoint is not None:
        with span("start/resume"):
            parts.trainer.load(opened.checkpoint / TRAINER)
            parts.gate.load_state(progress.gate)
        console.say(f"resuming after step {progress.step} of {parts.config.steps}")
    refit_other(parts, folder, progress.step)
    refit(parts, folder, progress.step)
    if opened.checkpoint is None:
        before = evaluate(parts, 0)
        folder.append_metrics({"step": 0, "time": now_iso(), "version": parts.trainer.version, **before})
        console.say(f"held-out before: {heldout_text(before)}")


def file_reads(folder: RunFolder, launch: Launch, parts: Parts) -> None:
    """Write the ledger again with the variables that were looked up while everything was built and first used."""
    launch.engine_reads = engine_reads(parts.engine)
    folder.write_environment(environment(parts.config))


def save_finished(parts: Parts, opened: Opened, console: Console) -> str:
    """Save the last finished step if the weights are still its and it is not saved; says which step is. A save that
    fails is told and not raised: what ended the run must be seen."""
    folder, progress = opened.folder, opened.progress
    try:
        saved = folder.latest_checkpoint()
        unsaved = progress.step > 0 and (saved is None or saved[0] < progress.step)
        if unsaved and parts.trainer.version == progress.version:
            save_checkpoint(folder, parts, progress)
        return last_saved(folder)
    except (OSError, CheckpointError) as error:
        console.say(f"step {progress.step} could not be saved: {error}")
        return "the last good checkpoint is the newest under checkpoints/"


def last_saved(folder: RunFolder) -> str:
    """In words, which step a resume would start from."""
    saved = folder.latest_checkpoint()
    return f"last saved step: {saved[0]}" if saved else "no step was saved"


def write_trace(recorder: Recorder, folder: RunFolder) -> None:
    """Write ``trace.json``. Its failure is a warning: a trace must not hide what ended a run."""
    try:
        recorder.write(folder.path / TRACE)
    except OSError as error:
        logger.warning("trace.json could not be written: %s", error)


def how_to_resume(folder: RunFolder) -> str:
    """The command that continues this run."""
    command = shlex.join(["lockstep", "train", str(folder.path / CONFIG), "--run-dir", str(folder.path)])
    return f"resume with: {command}"


def finish(folder: RunFolder, console: Console) -> int:
    """Write the report and print the result: held-out before and after, and where the report is."""
    report = write_report(folder.path)
    evaluations = [row for row in folder.metrics() if "eval/problems" in row]
    if len(evaluations) >= 2:
        sizes = {row.get("eval/problems") for row in (evaluations[0], evaluations[-1])}
        if len(sizes) > 1:
            console.result("before and after are of different numbers of problems and can't be compared:")
        console.result(f"held-out before: {heldout_text(evaluations[0])}")
        console.result(f"held-out after:  {heldout_text(evaluations[-1])}")
    console.result(f"report: {report}")
    return EXIT_DONE


def export(run_dir: Path, out: Path, step: int | None = None) -> Path:
    """Write a checkpoint's policy as a Hugging Face folder (safetensors and tokenizer). Returns ``out``.

    ``step`` None: the newest good checkpoint. Raises FileExistsError rather than writing into a folder with files.
    """
    return export_checkpoint(run_dir, out, step)
