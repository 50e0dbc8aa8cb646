"""The section of environment variables. ``schema.py`` puts it into the whole configuration."""

from __future__ import annotations

from pydantic import Field, field_validator

from lockstep.config.section import Section


class EnvironmentConfig(Section):
    """Variables that the run sets, each for the process that needs it. What a shell has besides is reported."""

    strict: bool = Field(
        default=False,
        description="A variable that nobody reads, that the installed version does not know or that another one "
        "contradicts is an error, not a warning.",
    )
    trainer: dict[str, str] = Field(
        default_factory=dict,
        description="Variables of the trainer's process alone. The value <secret> takes the variable from the shell; "
        "secrets are never written down.",
    )
    engine: dict[str, str] = Field(
        default_factory=dict,
        description="Variables of the rollout engine's process alone; of the trainer's, where the engine is in it.",
    )

    @field_validator("trainer", "engine")
    @classmethod
    def _are_variables(cls, table: dict[str, str]) -> dict[str, str]:
        for name, value in table.items():
            if not name or "=" in name or "\0" in name:
                raise ValueError(f"{name!r} is no name of a variable")
            if "\0" in value:
                raise ValueError(f"the value of {name} holds a zero byte, which no environment can")
        return table
