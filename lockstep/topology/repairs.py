"""The nearest legal values: what a violation's settings could be instead, found by asking the rules.

A candidate must pass the rule that is broken. Among those come first the ones that bring no other error and leave none
that is about the same setting, then the nearest. A setting of which no value passes is named as such, and the next one
is tried: an error never advises what can't work.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lockstep.topology.records import Job
from lockstep.topology.rules import RULES, Changes, Knob, Rule, apply, setting

_MAX_TRIED = 6
"""Passing candidates of a knob that are judged by the whole set of rules."""

_WIDEST = 8192
"""How far a count is searched from the present one: a mistyped number of nodes must not take minutes."""


def repair(rule: Rule, job: Job) -> tuple[str, Changes]:
    """What to change so that the rule is kept: text with up to two values, and the first one as settings. Empty where
    no value of any knob passes.

    Example: ``("ep 4 → 2 or 1", (("train.ep", 2),))``.
    """
    before = errors(job)
    hopeless: list[str] = []
    best: tuple[int, list[Changes], list[str]] | None = None
    for knob in rule.knobs:
        passing = list(itertools.islice(_passing(rule, job, knob), _MAX_TRIED))
        if not passing:
            hopeless.append(_name(knob))
            continue
        judged = [(_remaining(before, knob, apply(job, changes)), changes) for changes in passing]
        fewest = min(count for count, _ in judged)
        if best is None or fewest < best[0]:
            best = fewest, [changes for count, changes in judged if count == fewest], list(hopeless)
    if best is None:
        return "", ()
    shown = list(dict.fromkeys(best[1]))[:2] if all(map(_hashable, best[1])) else best[1][:1]
    text = describe(job, shown)
    if best[2]:
        text = f"no value of {' or '.join(best[2])} passes; {text}"
    return text, shown[0]


def errors(job: Job) -> frozenset[str]:
    """Ids of the rules of severity error that the job breaks; with sizes below 1, that one alone."""
    if RULES[0].broken(job) is not None:
        return frozenset({RULES[0].id})
    return frozenset(rule.id for rule in RULES if rule.severity == "error" and rule.broken(job) is not None)


def _remaining(before: frozenset[str], knob: Knob, changed: Job) -> int:
    """Errors that a change brings, and those about the same setting; both count double, or advice would go round."""
    same = {rule.id for rule in RULES if knob in rule.knobs}
    return sum((id not in before) + (id in same) for id in errors(changed))


def _hashable(changes: Changes) -> bool:
    return not any(isinstance(value, dict) for _, value in changes)


def describe(job: Job, alternatives: list[Changes]) -> str:
    """Changes as text. Alternatives of one setting share its name: "cp 4 → 2 or 1"."""
    first, *others = alternatives
    plain = len(first) == 1 and first[0][0] != "environment"
    if plain and all(len(other) == 1 and other[0][0] == first[0][0] for other in others):
        path = first[0][0]
        values = " or ".join(_show(changes[0][1]) for changes in alternatives)
        return f"{label(path)} {_show(setting(job, path))} → {values}"
    return "; or ".join(
        ", ".join(_one_change(path, setting(job, path), value) for path, value in changes) for changes in alternatives
    )


def _one_change(path: str, now: Any, value: Any) -> str:
    if path == "environment":
        return ", ".join(_variable_changes(now, value))
    return f"{label(path)} {_show(now)} → {_show(value)}"


def _variable_changes(now: Mapping[str, Mapping[str, str]], then: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Variables that differ, by process."""
    for process in sorted({*now, *then}):
        old, new = now.get(process, {}), then.get(process, {})
        for name in sorted(name for name in {*old, *new} if old.get(name) != new.get(name)):
            yield f"{process} {name} {_show(old.get(name))} → {_show(new.get(name))}"


def label(path: str) -> str:
    """A setting's name for a person: the trainer's bare, the engine's with "engine" in front."""
    parts = path.split(".")
    return f"engine {parts[-1]}" if parts[0] == "engine" else parts[-1]


def _passing(rule: Rule, job: Job, knob: Knob) -> Iterator[Changes]:
    """Candidates of a knob that keep the rule, nearest first."""
    candidates = _of_setting(job, knob) if isinstance(knob, str) else knob(job)
    for changes in candidates:
        if rule.broken(apply(job, changes)) is None:
            yield changes


def _of_setting(job: Job, path: str) -> Iterator[Changes]:
    part, _, rest = path.partition(".")
    if rest and getattr(job, part) is None:
        return  # the job has no such part
    now = setting(job, path)
    domain = list(_domain(path)(job, now))
    values = [value for value in domain if value != now]
    if isinstance(now, str) and now not in domain:
        values.sort(key=lambda value: -_likeness(now, value))
    if isinstance(now, int) and not isinstance(now, bool):
        values.sort(key=lambda value: (abs(value - now), value) if isinstance(value, int) else (1 << 60, 0))
    yield from (((path, value),) for value in values)


def _likeness(word: str, value: Any) -> float:
    """How much a misspelt value looks like a right one."""
    return difflib.SequenceMatcher(None, word, value).ratio() if isinstance(value, str) else 0.0


def _domain(path: str) -> Callable[[Job, Any], Iterable[Any]]:
    name = path.rpartition(".")[2]
    if path in ("engine.tp", "engine.pp", "engine.ep"):
        return _engine_size
    return _DOMAINS.get(name, _switch)


def _name(knob: Knob) -> str:
    return label(knob) if isinstance(knob, str) else knob.__name__.replace("_", " ")


def _show(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(str(part) for part in value) or "unset"
    return str(value)


# --- which values a setting can have ----------------------------------------------------------------------------------


@functools.cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [part for part in range(1, math.isqrt(number) + 1) if number % part == 0]
    return tuple(sorted({*small, *(number // part for part in small)}))


def _switch(job: Job, now: Any) -> Iterable[Any]:
    return (not now,) if isinstance(now, bool) else (None,)


def _axis(job: Job, now: Any) -> Iterable[Any]:
    """Sizes of the trainer's axes: what divides its world."""
    return divisors(max(1, job.train_world))


def _engine_size(job: Job, now: Any) -> Iterable[Any]:
    return divisors(max(1, job.engine_pool))


def _near(job: Job, now: Any) -> Iterable[Any]:
    """Any number up to twice the present one, for counts of samples, tokens and devices; of large ones the nearest and
    the divisors."""
    present = now or 1
    nearest = range(max(1, present - _WIDEST), min(2 * max(present, 16), present + _WIDEST) + 1)
    return nearest if nearest[0] == 1 else (*(part for part in divisors(present) if part < nearest[0]), *nearest)


def _pool(job: Job, now: Any) -> Iterable[Any]:
    """Devices of the engines' own."""
    present = now or 0
    return range(max(0, present - _WIDEST), min(job.num_gpus, present + _WIDEST + 1))


def _multiples(job: Job, now: Any) -> Iterable[Any]:
    """Numbers of tokens: multiples of 16 around the present one."""
    present = now or 0
    return (*range(present + 1, present + 4097), *range(max(1, present - 512), present))


def _virtual(job: Job, now: Any) -> Iterable[Any]:
    """Chunks, or layers of a chunk, where they are given."""
    return () if now is None else (*range(1, job.model.num_layers + 1), None)


def _choices(*values: Any) -> Callable[[Job, Any], Iterable[Any]]:
    return lambda job, now: values


_DOMAINS: dict[str, Callable[[Job, Any], Iterable[Any]]] = {
    **dict.fromkeys(("tp", "pp", "cp", "ep", "replicate", "ulysses", "optimizer_instances"), _axis),
    "etp": lambda job, now: (*divisors(max(1, job.train_world)), None),
    **dict.fromkeys(("gpus_per_engine", "dp", "moe_dp", "attention_cp", "decode_cp", "prefill_cp"), _engine_size),
    "moe_dense_tp": _choices(1, None),
    **dict.fromkeys(("nodes", "gpus_per_node", "num_prompts", "group_size", "global_batch", "micro_batch"), _near),
    **dict.fromkeys(("optimizer_steps", "microbatch_group", "max_running_requests"), _near),
    "rollout_gpus": _pool,
    **dict.fromkeys(("virtual_stages", "layers_per_virtual_stage"), _virtual),
    **dict.fromkeys(("pad_multiple", "prompt_tokens", "response_tokens"), _multiples),
    "chunked_prefill_tokens": _near,
    "page_tokens": _choices(16, 32, 64, 128, 256),
    "vocab_divisor": lambda job, now: (128, 64, 32, 16, 8, 4, 2, 1),
    "padded_vocab": lambda job, now: range((now or 0) + 1, (now or 0) + 4097),
    "optimizer_offload_fraction": _choices(0.0),
    "memory_fraction": _choices(0.9, 0.5),
    "fp8": _choices("blockwise", "delayed", "mxfp8", "none"),
    **dict.fromkeys(("moment_dtype", "master_dtype", "grad_dtype"), _choices("fp32")),
    "weight_dtype": _choices("bf16", "fp32"),
    "kv_cache_dtype": _choices("bf16"),
    "recompute": _choices("selective", "none", "full"),
    "recompute_method": _choices("uniform", None),
    "recompute_num_layers": _choices(1, None),
    "cp_comm_type": _choices("p2p", "a2a", "all_gather", "a2a+p2p", None),
    "cp_partition": _choices("contiguous", "zigzag", None),
    "moe_dispatcher": _choices("alltoall", "allgather", "flex"),
    "moe_flex_backend": _choices("deepep", "hybridep", "ncclep", None),
    "moe_router_dtype": _choices("fp32", None),
    "moe_router_padding": _choices(True, False),
    **dict.fromkeys(("per_token_loss", "fused_attention"), _choices(True, False)),
    **dict.fromkeys(("rope_fusion", "cuda_graphs", "custom_all_reduce"), _choices(False, True)),
    "router_score": _choices("sigmoid", "sqrtsoftplus", "softmax"),
    "implementation": _choices("miles", "verl"),
    "offload_target": _choices("cpu", "disk"),
    "optimizer": _choices("adam"),
    "pause_mode": _choices("retract", "in_place"),
    "rank_order": _choices("tp-cp-ep-dp-pp"),
    "deepep_mode": _choices("low_latency", "auto"),
}
