"""Rules of pipeline splits in Megatron: even, uneven, counted, given stage by stage, or as a layout string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from lockstep.topology.pipeline import (
    SplitError,
    parse_layout,
    splits,
    stage_counts,
    starts,
    virtual_stages,
)
from lockstep.topology.records import Job, TrainLayout
from lockstep.topology.rules import Changes, micro_batches, rule, train_of
from lockstep.topology.rules_megatron import ARGUMENTS, CONFIG

BLOCK = "Megatron-LM megatron/core/transformer/transformer_block.py: get_num_layers_to_build"
STRING = "Megatron-LM megatron/core/transformer/pipeline_parallel_layer_layout.py: PipelineParallelLayerLayout"
SCHEDULES = "Megatron-LM megatron/core/pipeline_parallel/schedules.py: forward_backward_pipelining_with_interleaving"


def differences(old: TrainLayout, new: TrainLayout) -> Changes:
    """The settings in which two layouts differ."""
    changes: list[tuple[str, object]] = []
    for field in fields(TrainLayout):
        if field.name == "switches":
            for switch in fields(old.switches):
                before, after = getattr(old.switches, switch.name), getattr(new.switches, switch.name)
                changes += [(f"train.switches.{switch.name}", after)] if before != after else []
        elif getattr(old, field.name) != getattr(new, field.name):
            changes.append((f"train.{field.name}", getattr(new, field.name)))
    return tuple(changes)


def stage_split(job: Job) -> list[Changes]:
    """Other numbers of layers on the end stages, nearest first; with virtual stages, then without."""
    train, starts_at = train_of(job), allowed_starts(job)
    found = splits(job.model.num_layers, train, starts_at)
    if train.virtual_stages is not None:
        found += splits(job.model.num_layers, replace(train, virtual_stages=None), starts_at)
    return [changes for split in found if (changes := differences(train, split))]


def allowed_starts(job: Job) -> tuple[int, ...]:
    """Layers on which a stage may begin; empty: any. A GLM layer without an indexer of its own takes the selection of
    the one before it, which must lie on the same stage."""
    return job.model.index_layers if job.model.attention == "mla_dsa" else ()


def written(train: TrainLayout) -> list[str]:
    """How the split is written: the settings that say so."""
    names = {
        "stage_layers": bool(train.stage_layers),
        "pipeline_layout": train.switches.pipeline_layout is not None,
        "account_for_embedding/loss": train.account_for_embedding or train.account_for_loss,
        "first/last_stage_layers": train.first_stage_layers is not None or train.last_stage_layers is not None,
    }
    return [name for name, given in names.items() if given]


def one_spelling(job: Job) -> list[Changes]:
    """Only the way of writing that would win, or none of them, or the end stages' layers."""
    return stage_split(job)


@rule("pipeline-spelling", source=f"{ARGUMENTS}; {BLOCK}", needs="megatron", knobs=(one_spelling,))
def pipeline_spelling(job: Job) -> str | None:
    """A split is written in one way: first and last stage, counted embedding and loss, every stage, or a string."""
    names = written(train_of(job))
    return f"the split is written in {len(names)} ways: {', '.join(names)}" if len(names) > 1 else None


def one_virtual_spelling(job: Job) -> list[Changes]:
    """The number of virtual stages alone."""
    train = train_of(job)
    keep: list[Changes] = [(("train.switches.layers_per_virtual_stage", None),)]
    if train.virtual_stages is not None:
        keep.append((("train.virtual_stages", None),))
        keep.append((("train.virtual_stages", None), ("train.switches.layers_per_virtual_stage", None)))
    return keep


@rule("virtual-spelling", source=ARGUMENTS, needs="megatron", knobs=(one_virtual_spelling,))
def virtual_spelling(job: Job) -> str | None:
    """Virtual stages are written once: per rank, by layers, or by a layout string; by layers also excludes first and
    last stage."""
    train = train_of(job)
    names = {
        "virtual_stages": train.virtual_stages is not None,
        "layers_per_virtual_stage": train.switches.layers_per_virtual_stage is not None,
        "pipeline_layout": train.switches.pipeline_layout is not None,
    }
    given = [name for name, there in names.items() if there]
    if len(given) > 1:
        return f"virtual stages are written in {len(given)} ways: {', '.join(given)}"
    ends = train.first_stage_layers is not None or train.last_stage_layers is not None
    if names["layers_per_virtual_stage"] and ends:
        layers = train.switches.layers_per_virtual_stage
        return f"layers_per_virtual_stage {layers} with the first or last stage's layers given"
    return None


def _split_problem(job: Job) -> str | None:
    """Why the split does not come out even; None where it does, or where it is written in several ways."""
    if virtual_spelling(job) or pipeline_spelling(job):
        return None
    try:
        stage_counts(job.model.num_layers, train_of(job))
    except SplitError as error:
        return str(error)
    return None


def counts_or_none(job: Job) -> tuple[int, ...] | None:
    """Layers of each stage, None where another rule refuses the split."""
    try:
        return stage_counts(job.model.num_layers, train_of(job))
    except SplitError:
        return None


@rule(
    "pipeline-even",
    source=BLOCK,
    needs="megatron",
    knobs=(stage_split, "train.virtual_stages", "train.switches.layers_per_virtual_stage", "train.pp"),
)
def pipeline_even(job: Job) -> str | None:
    """Where no split is given, the layers divide by pp, and a rank's by its virtual stages."""
    problem = None if written(train_of(job)) else _split_problem(job)
    return f"{problem} (pp {train_of(job).pp}, no split given)" if problem else None


@rule("pipeline-ends", source=BLOCK, needs="megatron", knobs=(stage_split, "train.virtual_stages", "train.pp"))
def pipeline_ends(job: Job) -> str | None:
    """First and last stage, where given, hold at least one layer; the rest divides by the stages between, which exist
    exactly if layers remain; every rank's layers divide by the virtual stages."""
    train = train_of(job)
    if written(train) != ["first/last_stage_layers"] or not (problem := _split_problem(job)):
        return None
    given = f"first {train.first_stage_layers or 'unset'}, last {train.last_stage_layers or 'unset'}"
    return f"{problem} ({job.model.num_layers} layers, pp {train.pp}, {given})"


@rule(
    "pipeline-ends-single",
    source="miles miles/utils/arguments.py: parse_args",
    needs="megatron",
    knobs=(stage_split,),
)
def pipeline_ends_single(job: Job) -> str | None:
    """Without a pipeline there is no first or last stage to give layers to."""
    train = train_of(job)
    if train.pp > 1 or (train.first_stage_layers is None and train.last_stage_layers is None):
        return None
    return f"pp 1 with first {train.first_stage_layers or 'unset'}, last {train.last_stage_layers or 'unset'}"


def accounting(job: Job) -> list[Changes]:
    """Counting the embedding, the loss, both or neither."""
    train = train_of(job)
    now = (train.account_for_embedding, train.account_for_loss)
    ways = [(False, True), (True, False), (True, True), (False, False)]
    paths = ("train.account_for_embedding", "train.account_for_loss")
    return [
        tuple((path, new) for path, new, old in zip(paths, way, now, strict=True) if new != old)
        for way in sorted(ways, key=lambda way: sum(new != old for new, old in zip(way, now, strict=True)))
        if way != now
    ]


@rule(
    "pipeline-accounting",
    source=f"{ARGUMENTS}; {BLOCK}",
    needs="megatron",
    knobs=(accounting, stage_split, "train.virtual_stages", "train.pp"),
)
def pipeline_accounting(job: Job) -> str | None:
    """Where embedding or loss counts as a layer, layers and these divide by pp · virtual stages."""
    train = train_of(job)
    if written(train) != ["account_for_embedding/loss"] or not (problem := _split_problem(job)):
        return None
    extra = train.account_for_embedding + train.account_for_loss
    return f"{problem} ({job.model.num_layers} + {extra} layers, pp {train.pp})"


def balanced(counts: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The same stages with as many layers in all as there are: taken from the last of the largest, given to the first
    of the smallest."""
    stages = [max(0, held) for held in counts]
    while sum(stages) > num_layers:
        stages[len(stages) - 1 - stages[::-1].index(max(stages))] -= 1
    while sum(stages) < num_layers:
        stages[stages.index(min(stages))] += 1
    return tuple(stages)


def stages_given(job: Job) -> list[Changes]:
    """The stages as they are given, with the right number of layers in all."""
    stages = balanced(train_of(job).stage_layers, job.model.num_layers)
    return [(("train.stage_layers", stages),)]


def string_given(job: Job) -> list[Changes]:
    """The layout string with every element once and in its place."""
    text = train_of(job).switches.pipeline_layout or ""
    try:
        stages = parse_layout(text)
    except SplitError:
        return []
    counts = balanced(stages.decoder, job.model.num_layers)
    written_stages = [f"t*{held}" if held > 1 else "t" * held for held in counts]
    written_stages[0] = "E" + written_stages[0]
    written_stages[-1] += "m" * job.model.mtp_layers * bool(sum(stages.mtp)) + "L"
    return [(("train.switches.pipeline_layout", "|".join(written_stages)),)]


@rule("pipeline-stages", source=STRING, needs="megatron", knobs=(stages_given, stage_split, "train.pp"))
def pipeline_stages(job: Job) -> str | None:
    """Stages given one by one are pp · virtual stages in number and hold all layers."""
    train = train_of(job)
    if written(train) != ["stage_layers"] or not (problem := _split_problem(job)):
        return None
    return f"stage_layers {','.join(map(str, train.stage_layers))}: {problem} (pp {train.pp})"


@rule("pipeline-string", source=STRING, needs="megatron", knobs=(string_given, stage_split, "train.pp"))
def pipeline_string(job: Job) -> str | None:
    """A layout string has its stages in a multiple of pp, each decoder layer once, one embedding, first, one loss,
    last, and its MTP layers in one stage, that rank's last chunk, after every decoder layer."""
    train, text = train_of(job), train_of(job).switches.pipeline_layout
    if text is None or written(train) != ["pipeline_layout"]:
        return None
    if problem := _split_problem(job):
        return f'"{text}": {problem} (pp {train.pp})'
    try:
        return f'"{text}": {misplaced}' if (misplaced := _misplaced(job, text)) else None
    except SplitError as error:  # the split is written in several ways, one of which is no split
        return str(error)


def _misplaced(job: Job, text: str) -> str | None:
    stages = parse_layout(text)
    last = len(stages.decoder) - 1
    if stages.embedding != (0,) or not text.lstrip(" (").startswith("E"):
        return "the embedding E comes once, first"
    if stages.loss != (last,) or not text.rstrip(" )*0123456789").endswith("L"):
        return "the loss L comes once, last"
    holding = [stage for stage, held in enumerate(stages.mtp) if held]
    if not holding:
        return None
    if len(holding) > 1 or sum(stages.mtp) != job.model.mtp_layers:
        return f"{sum(stages.mtp)} MTP layers on {len(holding)} stages: all {job.model.mtp_layers} lie on one"
    later = sum(stages.decoder[holding[0] + 1 :])
    chunk, virtual = holding[0] // train_of(job).pp, virtual_stages(job.model.num_layers, train_of(job))
    if later or chunk != virtual - 1:
        return f"MTP layers on stage {holding[0]}: they come after every decoder layer, in their rank's last chunk"
    return None


# --- schedule ---------------------------------------------------------------------------------------------------------


def group_sizes(job: Job) -> list[Changes]:
    """Other sizes of a micro-batch group."""
    count = micro_batches(job) or train_of(job).pp
    sizes = range(train_of(job).pp, max(count, train_of(job).pp) + 1)
    return [(("train.switches.microbatch_group", size),) for size in sizes]


@rule(
    "interleaved-schedule",
    source=f"{ARGUMENTS}; {SCHEDULES}",
    needs="megatron",
    knobs=(group_sizes, "batch.micro_batch", "train.virtual_stages", "train.switches.layers_per_virtual_stage"),
)
def interleaved_schedule(job: Job) -> str | None:
    """Virtual stages need a pipeline (of more than two ranks where its transfers do not overlap), groups of pp
    micro-batches up to all of them, and no last group smaller than pp."""
    train, counts = train_of(job), counts_or_none(job)
    if counts is None or len(counts) == train.pp:
        return None
    least = 2 if train.switches.overlap_p2p else 3
    if train.pp < least:
        return f"pp {train.pp} with {len(counts)} virtual stages: it needs pp {least} or more"
    group, count = train.switches.microbatch_group or train.pp, micro_batches(job)
    if group < train.pp or (count is not None and group > count):
        most = "" if count is None else f" to {count} micro-batches"
        return f"microbatch_group {group} with pp {train.pp}: it is from {train.pp}{most}"
    if count is not None and 0 < count % group < train.pp:
        return f"{count} micro-batches in groups of {group} leave {count % group}, fewer than pp {train.pp}"
    return None


@rule(
    "indexer-stage-start",
    source="miles miles_plugins/models/glm5: an index-share layer reads the selection of the layer before it",
    needs="megatron",
    knobs=(stage_split, "train.pp"),
)
def indexer_stage_start(job: Job) -> str | None:
    """No (virtual) stage of a GLM model starts on a layer that shares the selection of the one before it."""
    allowed, counts = allowed_starts(job), counts_or_none(job)
    if not allowed or counts is None:
        return None
    wrong = [layer for layer in starts(counts) if layer not in allowed]
    if not wrong:
        return None
    held = ",".join(map(str, counts))
    return (
        f"stages of {held} layers start on {', '.join(map(str, wrong))}, which share the indexer of a layer before them"
    )


@rule(
    "hyper-connections",
    source=f"{CONFIG} (upstream; the forks that miles and verl use lift it)",
    needs="megatron",
    knobs=("train.switches.implementation",),
)
def hyper_connections(job: Job) -> str | None:
    """Upstream Megatron trains hyper-connections without pipeline, full recomputation and MTP layers."""
    if not job.model.hyper_connections or train_of(job).switches.implementation != "upstream":
        return None
    obstacles = {
        f"pp {train_of(job).pp}": train_of(job).pp > 1,
        "recompute full": job.memory.recompute == "full",
        f"{job.model.mtp_layers} MTP layer": job.model.mtp_layers > 0,
    }
    there = [text for text, present in obstacles.items() if present]
    return f"hyper-connections in upstream Megatron with {', '.join(there)}" if there else None


def embedding_stage(job: Job) -> list[Changes]:
    """Splits whose first stage holds the layers that route by token."""
    need = job.model.hash_layers
    return [changes for changes in stage_split(job) if (dict(changes).get("train.first_stage_layers") or need) >= need]


@rule(
    "hash-layers-stage",
    severity="warning",
    source="NVIDIA-NeMo/RL guide of DeepSeek-V4: Megatron asserts a layout that keeps them beside the embedding",
    needs="megatron",
    knobs=(embedding_stage, "train.pp"),
)
def hash_layers_stage(job: Job) -> str | None:
    """Layers that route by token id lie on the first stage, where the tokens are."""
    need, counts = job.model.hash_layers, counts_or_none(job)
    if train_of(job).pp == 1 or not need or counts is None or counts[0] >= need:
        return None
    return f"the first stage holds {counts[0]} of {need} layers that route by token id"
