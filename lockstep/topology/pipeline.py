"""Which layers a pipeline stage holds, for every way in which Megatron lets a split be written.

    even                     L / (pp · virtual)
    first and last given     the rest is even
    embedding, loss counted  each counts as a layer, so their stage holds one fewer
    every stage given        ``stage_layers``, or a layout string "Et*6|t*6|t*5L"

Stage s of a pipeline with virtual stages lies on rank s % pp as its chunk s // pp; layers are numbered along s.

Source: Megatron-LM transformer/transformer_block.py: get_num_layers_to_build; transformer_layer.py:
get_transformer_layer_offset; pipeline_parallel_layer_layout.py: PipelineParallelLayerLayout.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lockstep.topology.records import TrainLayout


class SplitError(ValueError):
    """A pipeline split that does not come out even; the text has the numbers."""


@dataclass(frozen=True, slots=True)
class StageLayout:
    """A layout string, read: per stage its decoder and MTP layers; which stages hold the embedding and the loss."""

    decoder: tuple[int, ...]
    mtp: tuple[int, ...]
    embedding: tuple[int, ...]
    loss: tuple[int, ...]


def parse_layout(text: str) -> StageLayout:
    """Read a layout string: E embedding, t decoder layer, m MTP layer, L loss, "|" between stages, commas cosmetic,
    ``(..)*n`` expanded before ``x*n``. Raises ``SplitError`` on anything else."""
    expanded = text.replace(",", "").replace(" ", "")
    while match := re.search(r"\(([^()]*)\)\*(\d+)", expanded):
        expanded = expanded[: match.start()] + _times(match) + expanded[match.end() :]
    repeated = [int(count) if len(count) < 6 else _MAX_ELEMENTS for count in re.findall(r"[EtmL]\*(\d+)", expanded)]
    if sum(repeated) >= _MAX_ELEMENTS:
        raise SplitError(f'layout string "{text[:40]}" has {_TOO_MANY}')
    expanded = re.sub(r"([EtmL])\*(\d+)", _times, expanded)
    if wrong := sorted(set(expanded) - set("EtmL|")):
        raise SplitError(f'layout string "{text}" has {", ".join(wrong)}: its elements are E, t, m, L and |')
    stages = expanded.split("|")
    places = {
        letter: tuple(stage for stage, held in enumerate(stages) for _ in range(held.count(letter))) for letter in "EL"
    }
    return StageLayout(
        decoder=tuple(stage.count("t") for stage in stages),
        mtp=tuple(stage.count("m") for stage in stages),
        embedding=places["E"],
        loss=places["L"],
    )


def _times(match: re.Match[str]) -> str:
    """A repeated part written out; raises ``SplitError`` where that is longer than any layout."""
    count = int(match[2]) if len(match[2]) < 6 else _MAX_ELEMENTS
    if len(match[1]) * count >= _MAX_ELEMENTS:
        raise SplitError(f'layout string "…{match[0][:40]}…" has {_TOO_MANY}')
    return match[1] * count


_MAX_ELEMENTS = 1 << 16
_TOO_MANY = f"more than {_MAX_ELEMENTS} elements, which no model has"


def virtual_stages(num_layers: int, layout: TrainLayout) -> int:
    """Chunks per pipeline rank, however they are written. Raises ``SplitError`` where they don't come out whole."""
    switches = layout.switches
    if switches.pipeline_layout is not None:
        return _quotient(len(parse_layout(switches.pipeline_layout).decoder), layout.pp, "stages of the layout string")
    if (layers := switches.layers_per_virtual_stage) is not None:
        if layers < 1:
            raise SplitError(f"virtual stages of {layers} layers: they have at least 1")
        counted = num_layers + layout.account_for_embedding + layout.account_for_loss
        per_rank = _quotient(counted, layout.pp, "layers")
        if per_rank % layers:
            raise SplitError(f"{per_rank} layers a rank do not divide into virtual stages of {layers}")
        return per_rank // layers
    return layout.virtual_stages or 1


def stage_counts(num_layers: int, layout: TrainLayout) -> tuple[int, ...]:
    """Decoder layers of each (virtual) stage in order; pp · virtual entries. Raises ``SplitError`` for a split that
    Megatron refuses."""
    virtual = virtual_stages(num_layers, layout)
    num_stages = layout.pp * virtual
    if layout.switches.pipeline_layout is not None:
        return _exact(parse_layout(layout.switches.pipeline_layout).decoder, num_stages, num_layers)
    if layout.stage_layers:
        return _exact(layout.stage_layers, num_stages, num_layers)
    if layout.account_for_embedding or layout.account_for_loss:
        counted = num_layers + layout.account_for_embedding + layout.account_for_loss
        counts = [_quotient(counted, num_stages, "layers with embedding and loss")] * num_stages
        counts[0] -= layout.account_for_embedding
        counts[-1] -= layout.account_for_loss
        return tuple(counts)
    if layout.first_stage_layers is None and layout.last_stage_layers is None:
        return (_quotient(num_layers, num_stages, "layers"),) * num_stages
    ranks = [_quotient(held, virtual, "layers of a rank") for held in _ends_given(num_layers, layout)]
    return tuple(ranks) * virtual


def stage_chunks(num_layers: int, layout: TrainLayout) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Per pipeline rank, per virtual chunk: its decoder layers. Raises ``SplitError``."""
    counts = stage_counts(num_layers, layout)
    ends = list(itertools.accumulate(counts, initial=0))
    stages = [tuple(range(start, end)) for start, end in itertools.pairwise(ends)]
    return tuple(tuple(stages[rank :: layout.pp]) for rank in range(layout.pp))


def split_layers(num_layers: int, layout: TrainLayout) -> tuple[tuple[int, ...], ...]:
    """Per pipeline rank: its decoder layers in order, the chunks of virtual stages one after the other. Raises
    ``SplitError``.

    Example: 43 layers, pp 4, ``last_stage_layers`` 10: 0…10, 11…21, 22…32, 33…42.
    """
    return tuple(tuple(itertools.chain(*chunks)) for chunks in stage_chunks(num_layers, layout))


def starts(counts: Sequence[int]) -> tuple[int, ...]:
    """First layer of each stage that holds any."""
    firsts = itertools.accumulate(counts, initial=0)
    return tuple(first for first, held in zip(firsts, counts, strict=False) if held)


def splits(num_layers: int, layout: TrainLayout, allowed_starts: Sequence[int] = ()) -> list[TrainLayout]:
    """Every legal way to give the end stages' layers (or none): the nearest to the layout's own split first, where
    that gives none the most even one, with the smaller stage last. ``allowed_starts``: layers on which a stage may
    begin, empty for any. Of very deep models only splits near those two are tried.

    Example: 43 layers, pp 4, nothing given: ``last_stage_layers`` 10 comes first.
    """
    return list(_splits(num_layers, layout, tuple(allowed_starts)))


@functools.lru_cache(maxsize=64)
def _splits(num_layers: int, layout: TrainLayout, allowed_starts: tuple[int, ...]) -> tuple[TrainLayout, ...]:
    bare = replace(
        layout,
        first_stage_layers=None,
        last_stage_layers=None,
        stage_layers=(),
        account_for_embedding=False,
        account_for_loss=False,
        switches=replace(layout.switches, pipeline_layout=None, layers_per_virtual_stage=None),
    )
    wanted, scale = _wanted(num_layers, layout)
    found: list[tuple[tuple[int, ...], TrainLayout]] = []
    for first, last in _end_sizes(num_layers, layout):
        candidate = replace(bare, first_stage_layers=first, last_stage_layers=last)
        try:
            counts = stage_counts(num_layers, candidate)
        except SplitError:
            continue
        if allowed_starts and not set(starts(counts)) <= set(allowed_starts):
            continue
        ranks = [sum(counts[rank :: layout.pp]) for rank in range(layout.pp)]
        distance = sum((held * scale - want) ** 2 for held, want in zip(ranks, wanted, strict=True))
        order = (distance, max(ranks)) if _is_given(layout) else (max(ranks), distance)
        found.append(((*order, (first is not None) + (last is not None), ranks[-1]), candidate))
    return tuple(candidate for _, candidate in sorted(found, key=lambda entry: entry[0]))


def _is_given(layout: TrainLayout) -> bool:
    """Whether a split was asked for."""
    return bool(layout.stage_layers) or (layout.first_stage_layers, layout.last_stage_layers) != (None, None)


_MAX_SIZES = 128
"""Numbers of layers that are tried for one stage; no catalogued model has more."""


def _end_sizes(num_layers: int, layout: TrainLayout) -> Iterator[tuple[int | None, int | None]]:
    """Layers of the first and last stage worth trying: unset, or any number that leaves some for the others."""
    pp, share = layout.pp, num_layers // layout.pp
    first_given, last_given = layout.first_stage_layers, layout.last_stage_layers
    yield None, None
    if pp == 1:
        return
    for size in _near(range(1, num_layers), share, first_given, last_given):
        yield None, size
        yield size, None
    if pp == 2:
        for first in _near(range(1, num_layers), share, first_given):
            yield first, num_layers - first
        return
    for middle in _near(range(1, (num_layers - 2) // (pp - 2) + 1), share):
        ends = num_layers - middle * (pp - 2)
        yield from ((first, ends - first) for first in _near(range(1, ends), ends // 2, first_given))


def _near(sizes: range, *centres: int | None) -> Sequence[int]:
    """All of ``sizes``, or where they are very many those nearest to the centres that are given."""
    if len(sizes) <= _MAX_SIZES:
        return sizes
    known = [centre for centre in centres if centre is not None]
    half = _MAX_SIZES // (2 * len(known))
    return sorted({size for centre in known for size in range(centre - half, centre + half) if size in sizes})


def _wanted(num_layers: int, layout: TrainLayout) -> tuple[list[int], int]:
    """Layers of each rank as they were asked for, where nothing was an even share of the rest; in units of one over
    the second number, so that the shares are whole."""
    pp = layout.pp
    if len(layout.stage_layers) == pp:
        return list(layout.stage_layers), 1
    given = {0: layout.first_stage_layers, pp - 1: layout.last_stage_layers}
    known = {rank: held for rank, held in given.items() if held is not None}
    scale = max(1, pp - len(known))
    rest = num_layers - sum(known.values())
    return [known[rank] * scale if rank in known else rest for rank in range(pp)], scale


def _ends_given(num_layers: int, layout: TrainLayout) -> list[int]:
    """Layers of each rank where the first or last stage's number is given."""
    first, last = layout.first_stage_layers, layout.last_stage_layers
    given = [held for held in (first, last) if held is not None]
    num_others, others = layout.pp - len(given), num_layers - sum(given)
    if min(given) < 1:
        raise SplitError(f"an end stage of {min(given)} layers: it needs at least 1")
    if num_others < 0:
        raise SplitError(f"{len(given)} end stages are given, but pp is {layout.pp}")
    if others < 0 or (num_others > 0) != (others > 0):
        raise SplitError(f"{others} layers remain for {num_others} stages")
    middle = _quotient(others, num_others, "remaining layers") if num_others else 0
    head = [] if first is None else [first]
    tail = [] if last is None else [last]
    return [*head, *([middle] * num_others), *tail]


def _exact(counts: Sequence[int], num_stages: int, num_layers: int) -> tuple[int, ...]:
    if len(counts) != num_stages:
        raise SplitError(f"{len(counts)} stages are given for {num_stages}")
    if sum(counts) != num_layers:
        raise SplitError(f"the stages hold {sum(counts)} layers of {num_layers}")
    if min(counts) < 0:
        raise SplitError(f"a stage of {min(counts)} layers")
    return tuple(counts)


def _quotient(total: int, parts: int, what: str) -> int:
    if total % parts:
        raise SplitError(f"{total} {what} do not divide by {parts}")
    return total // parts
