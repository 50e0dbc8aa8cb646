"""Lockstep's side of the end-to-end comparison: ``lockstep.loop.run_sync`` as it is, held between steps by its console.

Each step does all that a run does: rollouts, rewards, forward-backward, agreement and verdict, optimizer, refit with
its receipt, and the records of the run folder.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.stepwise import StepGate
from benchmarks.workload import Workload
from lockstep.driver.assembly import Parts, assembled
from lockstep.driver.console import Console
from lockstep.driver.folder import open_run
from lockstep.driver.groups import GroupSampler, SampledGroups
from lockstep.driver.interrupt import StopRequest
from lockstep.driver.rows import Row
from lockstep.loop import refit, run_sync
from lockstep.spans import Recorder, recording


class ObservedSampler(GroupSampler):
    """A sampler that keeps what it sampled last. Without ``stop_token_ids`` every completion has the full length."""

    last: SampledGroups

    @classmethod
    def around(cls, parts: Parts, *, stops: bool) -> ObservedSampler:
        """The sampler of ``parts``, observed."""
        inner = parts.sampler
        return cls(
            parts.engine,
            parts.task,
            inner.renderer,
            parts.decode,
            parts.config.rollout,
            parts.config.algorithm,
            seed=inner.seed,
            stop_token_ids=inner.sampling.stop_token_ids if stops else (),
            runner=inner.runner,
        )

    def sample(self, step: int, cursor: int) -> SampledGroups:
        """See ``GroupSampler.sample``."""
        self.last = super().sample(step, cursor)
        return self.last


class HeldConsole(Console):
    """Reports each step to the gate instead of printing it, and stands there until the next one is wanted."""

    def __init__(self, gate: StepGate, sampler: ObservedSampler, recorder: Recorder) -> None:
        super().__init__()
        self._gate, self._sampler, self._recorder = gate, sampler, recorder
        self._num_events = 0

    def step(self, row: Row, num_steps: int) -> None:
        """The loop has finished a step."""
        rollouts = self._sampler.last.rollouts
        phases: dict[str, float] = {}
        for event in self._recorder.events[self._num_events :]:
            name, microseconds = str(event["name"]), event["dur"]
            assert isinstance(microseconds, float)
            phases[name] = phases.get(name, 0.0) + microseconds / 1e6
        self._num_events = len(self._recorder.events)
        self._gate.finish(
            problem_ids=list(dict.fromkeys(rollout.problem.problem_id for rollout in rollouts)),
            completion_tokens=[rollout.num_sampled_tokens for rollout in rollouts],
            prompt_tokens=[len(r.sequences[0].tokens) - r.num_sampled_tokens for r in rollouts],
            rewards=[rollout.score.reward for rollout in rollouts],
            num_updates=int(row["version"]),
            generate_s=phases["rollout/generate"],
            phases_s=phases,
            agreement={key: value for key, value in row.items() if key.startswith("agreement/")},
            verdict=row["verdict/status"],
        )


def run(work: Workload) -> None:
    """Run steps until the parent has enough."""
    gate = StepGate()
    resolved = work.resolved()
    with tempfile.TemporaryDirectory() as directory:
        opened = open_run(resolved, Path(directory) / "run")
        recorder = Recorder()
        with opened.folder as folder, recording(recorder), assembled(resolved.config, print, warm_up=True) as built:
            sampler = ObservedSampler.around(built, stops=work.lengths == "ragged")
            parts = replace(built, sampler=sampler)
            refit(parts, folder, 0)
            recorder.take_totals()
            recorder.events.clear()
            gate.wait(settings=_settings(parts))
            run_sync(parts, folder, opened.progress, HeldConsole(gate, sampler, recorder), recorder, StopRequest(print))


def _settings(parts: Parts) -> dict[str, Any]:
    config = parts.config
    return {"rollout": config.rollout.model_dump(), "trainer": config.trainer.model_dump()}


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """``--lengths``, ``--steps`` and ``--threads``, which both sides take."""
    parser.add_argument("--lengths", choices=("uniform", "ragged"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)


def main() -> None:
    """The child process that ``end_to_end`` starts."""
    parser = argparse.ArgumentParser(description="One side of benchmarks.end_to_end; not to be run by hand.")
    add_workload_arguments(parser)
    arguments = parser.parse_args()
    run(Workload(arguments.lengths, arguments.steps, arguments.threads))


if __name__ == "__main__":
    main()
