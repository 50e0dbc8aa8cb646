"""What Lockstep can run of what it can plan: ``lockstep train`` refuses the rest by name, before anything starts.

A layout needs evidence where it names a kind of hardware or spreads over several devices: somebody has run it. One
process on the machine at hand has no layout that could be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.config.errors import ConfigError, Violation
from lockstep.config.schema import RunConfig
from lockstep.driver.jobs import job_of
from lockstep.topology.catalogue import hardware
from lockstep.topology.evidence import KnownLayout, find_evidence, memory_differences

PLAN = "`lockstep plan` judges it and prints its arguments for the programs that run it today"


def not_runnable(config: RunConfig) -> list[Violation]:
    """Everything in a configuration that can be planned and not yet run."""
    return list(_not_runnable(config))


def _not_runnable(config: RunConfig) -> Iterator[Violation]:
    cluster, layout = config.cluster, config.rollout.layout
    devices = cluster.nodes * cluster.gpus_per_node
    if config.trainer.backend == "megatron":
        message = "Lockstep does not run the megatron trainer yet"
        yield Violation("trainer.backend", message, f'set trainer.backend = "fsdp" on one device; {PLAN}')
    if config.rollout.engine == "sglang":
        message = "Lockstep does not run the sglang engine yet"
        yield Violation("rollout.engine", message, f'set rollout.engine = "torch" or "vllm"; {PLAN}')
    if devices > 1:
        message = f"Lockstep runs one rank, this is a job of {devices} devices"
        also = ("cluster.gpus_per_node",)
        yield Violation("cluster.nodes", message, f"set both to 1 for a model that fits one device; {PLAN}", also)
    elif (replicas := config.trainer.layout.replicate or 1) > 1:
        message = f"{replicas} replicas of the sharded model need as many devices, this is a job of one"
        yield Violation("trainer.layout.replicate", message, f"leave it out; {PLAN}", ("cluster.gpus_per_node",))
    if config.rollout.engine != "vllm":
        return
    if config.rollout.quantisation != "none" and config.trainer.backend == "megatron":
        message = "Lockstep does not refit vLLM with quantised weights from this trainer"
        yield Violation("rollout.quantisation", message, 'set rollout.quantisation = "none"')
    ranks = layout.tp * layout.pp * layout.dp
    if ranks > 1 or layout.gpus_per_engine > 1:
        message = f"Lockstep runs vLLM with one worker, this layout has {max(ranks, layout.gpus_per_engine)}"
        yield Violation("rollout.layout.tp", message, "leave rollout.layout at 1 everywhere")
    for name, off in (("kv_cache_dtype", "bf16"), ("moe_a2a", None), ("speculative", False), ("ep", 1)):
        if getattr(layout, name) != off:
            key = f"rollout.layout.{name}"
            yield Violation(key, "Lockstep does not pass it to vLLM yet", f"leave it out; {PLAN}")


def needs_evidence(config: RunConfig) -> bool:
    """Whether a configuration has a layout that somebody must have shown: a kind of accelerator, or several devices."""
    cluster = config.cluster
    named = cluster.hardware is not None and hardware(cluster.hardware).vendor != "cpu"
    return named or cluster.nodes * cluster.gpus_per_node > 1


def refuse_to_run(config: RunConfig) -> None:
    """Raises ``ConfigError`` with everything that Lockstep can't run, or for a layout without evidence unless
    ``cluster.unverified`` allows it. With either come the devices that this machine lacks: one list, not two rounds."""
    problems = not_runnable(config)
    if needs_evidence(config) and not problems and not config.cluster.unverified:
        known = find_evidence(job_of(config))
        if known is None or not known.verified:
            problems.append(_unverified(config, known))
    if problems:
        raise ConfigError(f"{config.name} can't run here", [*problems, *_absent(config, problems)])


def _absent(config: RunConfig, told: Sequence[Violation]) -> list[Violation]:
    """The hardware that is not here, but for keys that were told already."""
    from lockstep.driver.needs import absent_hardware

    keys = {key for violation in told for key in (violation.key, *violation.also)} - {"cluster.hardware"}
    return [violation for violation in absent_hardware(config) if violation.key not in keys]


def layout_facts(config: RunConfig) -> dict[str, Any]:
    """What the run folder keeps about the layout and its evidence."""
    return layout_record(config, find_evidence(job_of(config)) if needs_evidence(config) else None)


def layout_record(config: RunConfig, known: KnownLayout | None) -> dict[str, Any]:
    """The evidence of a layout as plain data, for ``environment.json`` and ``--json``. ``verified`` is of the split
    over ranks, ``differs_in`` its memory settings that are not those of the run."""
    return {
        "needs_evidence": needs_evidence(config),
        "unverified_allowed": config.cluster.unverified,
        "verified": known is not None and known.verified,
        "evidence": None if known is None else known.evidence.text(),
        "known_as": None if known is None else known.name,
        "status": "" if known is None else known.status,
        "differs_in": [] if known is None else list(memory_differences(job_of(config), known)),
    }


def _unverified(config: RunConfig, known: KnownLayout | None) -> Violation:
    if known is None:
        message = f"nobody has shown this layout on {config.cluster.hardware or 'these devices'}"
    else:
        message = f"this layout is not verified: {known.status or known.evidence.text()}"
    return Violation(
        "cluster.unverified",
        message,
        "run it with --unverified, which the run folder records, or take a layout of `lockstep recipes list`",
        ("cluster.hardware", "cluster.nodes", "cluster.gpus_per_node"),
    )
