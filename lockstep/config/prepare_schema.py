"""The section of a recipe that says what ``lockstep prepare`` makes of a published checkpoint."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lockstep.config.section import Quantisation, Section


class PrepareConfig(Section):
    """From a published checkpoint to what the recipe loads: ``lockstep prepare``. Training does not read it."""

    source: str | None = Field(
        default=None,
        description="Model folder, used in place, or a name on the Hugging Face hub; ${VARIABLES} are expanded; "
        "--source goes first. None: model.path, if that is a folder.",
    )
    revision: str | None = Field(
        default=None, description="Commit, branch or tag of a hub name; the commit that it means is recorded."
    )
    target: str | None = Field(
        default=None,
        description="Folder of the prepared checkpoints; --target goes first. None: prepared/ and the name.",
    )
    keep_layers: int | None = Field(
        default=None, ge=1, description="Keep only the first layers: a smoke test's model. None keeps all."
    )
    keep_mtp: bool = Field(
        default=False, description="Keep the layers of multi-token prediction when layers are pruned."
    )
    quantisation: Literal["as_rollout", Quantisation] = Field(
        default="as_rollout",
        description="Format of the engine's checkpoint; as_rollout: that of rollout.quantisation. none: the engine "
        "loads the trainer's.",
    )
    high_precision: tuple[str, ...] = Field(
        default=(),
        description="Regular expressions of names that stay as they are beyond the family's table. Refits follow the "
        "table alone, so this is refused where rollout.quantisation is set.",
    )
    shard_ranks: int = Field(
        default=0,
        ge=0,
        description="Ranks of the distributed checkpoint that is written for the trainer; it loads on any number. "
        "0: none is written, the trainer loads the folder.",
    )
    file_bytes: int = Field(
        default=4 * 2**30, ge=1, description="Largest file in bytes; a file is what a kill costs at most."
    )
