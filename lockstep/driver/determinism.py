"""What Megatron's deterministic mode demands of the trainer's variables: a value that it refuses ends the job at start.

Source: NVIDIA/Megatron-LM megatron/training/determinism.py: apply_determinism_env. It fills in what is not set.
"""

from __future__ import annotations

from lockstep.config.schema import RunConfig
from lockstep.topology.records import Finding

ACCEPTED = {
    "NCCL_ALGO": ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
}
"""Values that have one order of sums; NCCL_ALGO may list several of its own."""

_SOURCE = "Megatron-LM megatron/training/determinism.py: apply_determinism_env"


def determinism_findings(config: RunConfig) -> list[Finding]:
    """Variables of the trainer that ``trainer.megatron.deterministic`` refuses."""
    if not config.trainer.megatron.deterministic:
        return []
    declared = config.environment.trainer
    return [
        Finding(
            "deterministic-variable",
            "error",
            f"{name}={declared[name]} has no fixed order of sums, which deterministic mode asks for",
            f"environment.trainer.{name} → {accepted[0]}",
            _SOURCE,
        )
        for name, accepted in ACCEPTED.items()
        if name in declared and not _accepts(declared[name], accepted)
    ]


def _accepts(value: str, accepted: tuple[str, ...]) -> bool:
    words = [word.strip() for word in value.split(",")]
    return all(word in accepted for word in words)
