"""The command ``lockstep prepare``. Exit codes as everywhere: 0 done, 1 a checkpoint is refused, 2 bad usage."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli_recipes import HardwareOption, VariantOption

if TYPE_CHECKING:
    from lockstep.checkpoint.prepare import Prepared
    from lockstep.config.schema import RunConfig


class Stage(StrEnum):
    """The stages, in order."""

    FETCH = "fetch"
    VALIDATE = "validate"
    PRUNE = "prune"
    DEQUANTISE = "dequantise"
    QUANTISE = "quantise"
    SHARD = "shard"


EPILOG = (
    "Examples:  lockstep prepare quickstart --source path/to/model --dry-run   |   "
    "lockstep prepare deepseek-v4-flash-4layer --source path/to/DeepSeek-V4-Flash --hardware h200   |   "
    "lockstep prepare my.toml --source path/to/model --target prepared/mine --set prepare.quantisation=fp8   |   "
    "lockstep prepare my.toml --stage quantise --restart"
)


def prepare(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name or a TOML file.")],
    source: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder or hub name; default: prepare.source, or model.path.")
    ] = None,
    target: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where results lie; default: prepare.target, or prepared/NAME.")
    ] = None,
    stage: Annotated[
        list[Stage] | None, typer.Option(help="Only this stage, on what those before it left. Repeatable.")
    ] = None,
    hardware: HardwareOption = None,
    variants: VariantOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Files that are written at a time.")] = 2,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, with sizes; write nothing.")
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Forget what these stages did before; needed after a changed source.")
    ] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting. Repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Prepare a checkpoint for a recipe: fetch, validate, prune, dequantise, quantise, shard.

    Run it again after a kill, a full disk or an interrupt: finished files are verified by their digests and kept.
    """
    from lockstep.recipes import load_recipe

    config = load_recipe(recipe, overrides or (), hardware=hardware, variants=variants or ()).config
    chosen = source or _source_of(config)
    from lockstep.checkpoint.prepare import Preparation
    from lockstep.checkpoint.progress import TerminalProgress

    where = target or Path(config.prepare.target or f"prepared/{config.name}")
    with TerminalProgress() as progress:
        result = Preparation(
            config.prepare,
            chosen,
            where,
            progress,
            rollout_quantisation=config.rollout.quantisation,
            catalogue=None if config.model.source == "random" else config.model.catalogue,
            only=tuple(one.value for one in stage or ()),
            workers=workers,
            restart=restart,
            dry_run=dry_run,
        ).run()
    print(json.dumps(asdict(result), indent=2) if as_json else _text(result))


def _source_of(config: RunConfig) -> str:
    """What the recipe prepares: ``prepare.source``, else the published folder that the model is loaded from."""
    from lockstep.config.paths import PathTextError, expand

    if config.prepare.source is not None:
        try:
            return expand(config.prepare.source, os.environ)
        except PathTextError as error:
            raise typer.BadParameter(str(error), param_hint="prepare.source") from error
    if config.model.source == "path":
        return config.model.path
    raise typer.BadParameter("give the model's folder, or set prepare.source in the recipe", param_hint="--source")


def _text(result: Prepared) -> str:
    lines = [
        f"{one.stage:10}  {one.status:13}  {one.num_bytes / 1e9:10.3f} GB  {one.seconds:8.1f} s  "
        f"{one.detail or one.folder}"
        for one in result.stages
    ]
    lines += ["", f"trainer  {result.trainer}", f"engine   {result.engine}"]
    return "\n".join([*lines, f"shards   {result.shards}"] if result.shards else lines)
