"""A run and its folder: opening one to run or to resume, saving a checkpoint, exporting one."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from lockstep.config.errors import ConfigError, Violation
from lockstep.config.load import ResolvedConfig, dump_resolved, flatten, load_run_config
from lockstep.config.schema import RunConfig
from lockstep.driver.assembly import Parts
from lockstep.driver.environment import current_launch, shown_command
from lockstep.driver.inputs import changed_inputs, fingerprints
from lockstep.driver.progress import FILE as PROGRESS_FILE
from lockstep.driver.progress import Progress
from lockstep.driver.runnable import layout_facts
from lockstep.metrics.run_folder import CONFIG, RunFolder
from lockstep.spans import span

TRAINER = "trainer"
CHANGEABLE = (
    *("description", "threads", "checkpoint.", "eval.", "refit.verify_every"),
    *("algorithm.abstain_patience", "algorithm.idle_patience"),
)
"""Keys (or sections) that a resumed run may change: they do not touch what is learned. With a constant learning rate
``steps`` may rise as well."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An open run folder, where the run stands, and the checkpoint to load (None: start afresh)."""

    folder: RunFolder
    progress: Progress
    checkpoint: Path | None


def default_run_dir(config: RunConfig) -> Path:
    """``runs/NAME-TIME`` under the current folder: every run its own."""
    return Path("runs") / f"{config.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def open_run(resolved: ResolvedConfig, run_dir: Path) -> Opened:
    """Create the folder, or open one whose configuration is the same and find its newest good checkpoint.

    Raises ConfigError naming the keys in which a resumed run's configuration differs, RunFolderError if another
    process runs there.
    """
    folder = RunFolder(run_dir)
    try:
        latest = folder.latest_checkpoint()
        began = latest is not None or bool(folder.metrics())
        if not began or _changed_keys(resolved, run_dir):  # a run that never began may be anything
            folder.write_config(dump_resolved(resolved))
        folder.write_environment(environment(resolved.config))
        inputs = fingerprints(resolved.config)
        if latest is None:
            folder.rewind(-1)
            return Opened(folder, Progress(inputs=inputs), None)
        step, checkpoint = latest
        progress = Progress.load(checkpoint)
        _refuse_other_inputs(progress.inputs, inputs, run_dir)
        folder.rewind(step)
        return Opened(folder, progress, checkpoint)
    except BaseException:
        folder.close()
        raise


def _refuse_other_inputs(before: dict[str, str], now: dict[str, str], run_dir: Path) -> None:
    changed = changed_inputs(before, now)
    if changed:
        way_out = "put the earlier file back, or start a new run with another --run-dir"
        raise ConfigError(
            f"resuming {run_dir}",
            [Violation(key, "the file that it names has changed since the run began", way_out) for key in changed],
        )


def _changed_keys(resolved: ResolvedConfig, run_dir: Path) -> list[str]:
    """Keys in which a resumed run's configuration differs. Raises ConfigError if one of them may not."""
    recorded = load_run_config(str(run_dir / CONFIG), find_recipe=no_recipe).config
    before, now = flatten(recorded), flatten(resolved.config)
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    changeable = CHANGEABLE
    if recorded.trainer.schedule == "constant" and resolved.config.steps > recorded.steps:
        changeable = (*changeable, "steps")  # more steps at a constant rate: the earlier ones were no different
    differing = [key for key in changed if not key.startswith(changeable)]
    if differing:
        raise ConfigError(
            f"resuming {run_dir}",
            [
                Violation(
                    key,
                    f"was {before.get(key)!r} when the run began and is {now.get(key)!r} now",
                    "resume with the same configuration, or start a new run with another --run-dir",
                )
                for key in differing
            ],
        )
    return changed


def no_recipe(name: str) -> RunConfig:
    """Recipe finder for a resolved configuration, which extends none."""
    raise ValueError(f"a resolved configuration extends nothing, this one extends {name!r}")


def environment(config: RunConfig) -> dict[str, object]:
    """Versions, hardware, the ledger of variables and the layout's evidence for ``environment.json``. Holds no
    secret."""
    from lockstep.hardware.profile import detect

    launch = current_launch()
    variables = {} if launch is None else {"variables": launch.as_dict()}
    return {
        "command": shown_command(launch),
        "pid": os.getpid(),
        "profile": asdict(detect()),
        "layout": layout_facts(config),
        **variables,
    }


def save_checkpoint(folder: RunFolder, parts: Parts, progress: Progress) -> None:
    """Trainer's state and progress, written beside and renamed; older checkpoints go when it is complete."""
    with span("save"):
        required = (PROGRESS_FILE, f"{TRAINER}/.metadata")
        with folder.saving_checkpoint(progress.step, parts.trainer.checkpoint_bytes(), required) as path:
            parts.trainer.save(path / TRAINER)
            progress.save(path)
        folder.prune_checkpoints(parts.config.checkpoint.keep)
