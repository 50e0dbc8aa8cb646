"""``lockstep demo stale-refit``: a weight update that reports success and leaves one layer as it was.

The quickstart's model is trained for a few steps. From the refit after step 3 on, the demo replaces one layer's tensors
on their way into the engine by the engine's own old ones: the fault is planted here, around the receiver, and the
product has no switch for it. That refit is verified, and refused. Then the demo does what a run without verification
does: the same refit again, unverified, and the next step. One run tells both, because verifying changes no weight.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from lockstep import loop
from lockstep.driver.assembly import Parts
from lockstep.driver.evidence import from_run
from lockstep.driver.parity_commands import attribute_evidence, print_attribution
from lockstep.loop import EXIT_GATE, train
from lockstep.metrics.run_folder import RunFolder, RunFolderError
from lockstep.metrics.sinks import read_jsonl
from lockstep.model.gguf_files import parsed_once
from lockstep.parity.attribute import Attribution
from lockstep.recipes import load_recipe
from lockstep.records import Problem, Score
from lockstep.refit.transaction import Receipt, RefitError
from lockstep.rollout.receiver import TorchReceiver

LAYER = "model.layers.11"
STALE_STEP = 3
NEVER = 1000
NUM_GOOD_REFITS = STALE_STEP + 1  # other weights, the first policy's, and one after each step before
FACTORS = ("prefill", "fast-path-off", "packing-single", "load")
SETTINGS = (
    "name='stale-refit'",
    f"steps={STALE_STEP + 1}",
    # A few dozen tokens a step: a second thread mostly waits, and beside other work both wait for each other.
    "threads=1",
    "algorithm.num_prompts=2",
    "algorithm.group_size=4",
    "rollout.max_new_tokens=8",
    "eval.num_problems=1",
    "checkpoint.every=100",
    # So few samples are seldom right: a reward with many values moves the weights at each step all the same.
    "task.rewards=[{name='arithmetic'}, {name='lockstep.demo:share_of_digits'}]",
    # In float32 the sides differ by 3e-6, so that one update of one layer stands out; bfloat16 rounds by 0.04 here.
    "trainer.dtype='float32'",
    "rollout.dtype='float32'",
    "gate.bounds=[{bound=1e-3, dtype='float32', shown=true, evidence='float32 on both sides: 3e-6 here'}]",
    "gate.min_tokens=8",  # of eight rollouts: an answer may be a single token
    "trainer.learning_rate=1e-4",
    "trainer.schedule='constant'",
    "trainer.warmup_steps=0",
    "trainer.decay_start_step=0",
    "trainer.final_ratio=0.1",
)


def share_of_digits(problem: Problem, completion: str, stopped: bool) -> Score:
    """A reward that differs between almost any two completions: the share of digits among its characters."""
    del problem, stopped
    return Score(reward=sum(c.isdigit() for c in completion) / max(len(completion), 1))


@contextmanager
def layer_dropped(layer: str, after: int) -> Iterator[None]:
    """While the block runs, refits of an engine beyond its first ``after`` silently leave ``layer`` as it was."""
    original = TorchReceiver.receive
    seen: dict[TorchReceiver, int] = {}

    def receive(self: TorchReceiver, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        seen[self] = seen.get(self, 0) + 1
        if seen[self] > after:
            old = {name: tensor.clone() for name, tensor in self.live() if name.startswith(f"{layer}.")}
            tensors = ((name, old.get(name, tensor)) for name, tensor in tensors)
        original(self, tensors)

    TorchReceiver.receive = receive
    try:
        yield
    finally:
        TorchReceiver.receive = original


@contextmanager
def refused_then_unverified(refused: list[RefitError]) -> Iterator[None]:
    """While the block runs, a refit that is refused after ``STALE_STEP`` is told, added to ``refused`` and done again
    without verification, so that the run goes on as one that does not verify."""
    original = loop.refit

    def refit(parts: Parts, folder: RunFolder, step: int) -> Receipt:
        try:
            return original(parts, folder, step)
        except RefitError as error:
            if step != STALE_STEP:
                raise
            refused.append(error)
            _tell(f"The receipt refuses it before a token is sampled from it, and a run ends here:\n  {error}")
            _tell(f"2. Without verification (refit.verify_every={NEVER}): the same refit again, and step {step + 1}.")
            never = parts.config.refit.model_copy(update={"verify_every": NEVER})
            return original(replace(parts, config=parts.config.model_copy(update={"refit": never})), folder, step)

    loop.refit = refit
    try:
        yield
    finally:
        loop.refit = original


@dataclass(frozen=True, slots=True)
class Story:
    """What the demo trains, and the layer that a refit drops after ``STALE_STEP``."""

    recipe: str = "quickstart"
    settings: tuple[str, ...] = SETTINGS
    layer: str = LAYER


def stale_refit(run_dir: Path | None = None, story: Story | None = None) -> int:
    """Tell the story and return 0 if both the receipt and the gate caught the fault and its layer was named.

    Raises RunFolderError if ``run_dir`` holds something already.
    """
    story = story or Story()
    started = time.perf_counter()
    folder = run_dir or Path("runs") / f"stale-refit-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    if folder.exists() and any(folder.iterdir()):
        raise RunFolderError(f"{folder} is not empty; choose a new folder")
    _tell(
        f"{story.recipe}, {STALE_STEP + 1} steps. The refit after step {STALE_STEP} drops {story.layer}: the engine "
        "keeps that layer's old weights, every call succeeds, no error is raised."
    )
    _tell(f"1. That refit is verified (refit.verify_every={STALE_STEP}).")
    refused: list[RefitError] = []
    with parsed_once():
        with layer_dropped(story.layer, after=NUM_GOOD_REFITS), refused_then_unverified(refused):
            code = train(load_recipe(story.recipe, [*story.settings, f"refit.verify_every={STALE_STEP}"]), folder)
        caught = len(refused) == 1 and story.layer in str(refused[0])
        if not refused:
            _tell("No refit was refused: the fault was NOT caught by the receipt.")
        gc.collect()  # models lie in reference cycles: without this, run and search would both be in memory
        result = _searched(folder, code)
    if result is None:
        return 1
    named = result.refined.get("load") == frozenset({f"load:{story.layer}"})
    _tell(
        f"Caught by the receipt: {_yes(caught)}. Stopped by the gate: yes. Layer named: {_yes(named)}. "
        f"{time.perf_counter() - started:.0f} s; look at {folder / 'report.html'}, or search yourself:\n"
        f"  lockstep parity attribute {folder}"
    )
    return 0 if caught and named else 1


def _searched(run_dir: Path, code: int) -> Attribution | None:
    """What the gate said, and the search for the cause in what the run left behind; None if the gate did not stop."""
    row = read_jsonl(run_dir / "metrics.jsonl")[-1]
    metric, bound = row["agreement/metric"], row["agreement/bound"]
    measured = f"{metric} {row[f'agreement/{metric}']:.3g}, bound {bound:.3g}"
    if code != EXIT_GATE:
        _tell(f"The gate did NOT stop it: {measured}.")
        return None
    _tell(f"The gate stops it at step {row['step']}, before the optimizer moves: {measured}.")
    _tell(f"Which of {', '.join(FACTORS)} is it? The batch is scored again under each:")
    result, told = attribute_evidence(from_run(run_dir), FACTORS)
    print_attribution(result)
    _tell(told)
    return result


def _tell(text: str) -> None:
    print(f"\n{text}", flush=True)


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
