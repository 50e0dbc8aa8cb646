"""Validation of a checkpoint folder: everything that is wrong with it, in one report, from headers and a sample.

    scan_checkpoint      folder, links, pickles, code, index, headers, offsets, sizes      headers.py
          │ config, tensors
    read_layout          what config.json describes, per family                            expected/
    check_config         … and whether that is what the recipe expects                     expectation.py
    compare              every tensor once with shape and dtype, none left over, scales    weights.py
    sample_values        finite, scales positive, ids in range: a bounded sample           values.py
          ▼
       Report

The folder is read and never written; no weight is loaded, no code of it is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.errors import CheckpointError, Problem, described
from lockstep.checkpoint.expectation import Expectation, check_config
from lockstep.checkpoint.expected import read_layout
from lockstep.checkpoint.expected.quantised import Scheme, read_scheme
from lockstep.checkpoint.expected.rows import expand
from lockstep.checkpoint.headers import Scan, scan_checkpoint
from lockstep.checkpoint.records import CheckpointIndex
from lockstep.checkpoint.values import SAMPLE_BYTES, equal_bytes, judged_tensors, sample_values
from lockstep.checkpoint.weights import compare


@dataclass(frozen=True, slots=True)
class Report:
    """A validation's outcome. ``notes`` are no faults: parts that are absent as a whole, what could not be compared.
    ``facts`` are the sizes that ``config.json`` states, by the names of ``ModelShape``."""

    folder: Path
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    facts: Mapping[str, Any]
    quantisation: str | None
    num_tensors: int
    num_bytes: int
    sampled_bytes: int
    index: CheckpointIndex | None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def checked(self) -> CheckpointIndex:
        """The folder's index. Raises CheckpointError with every problem if there is any."""
        if self.problems or self.index is None:
            raise CheckpointError(self.folder, self.problems)
        return self.index

    def text(self) -> str:
        """The report for a reader, of bounded length."""
        count = len(self.problems)
        lines = [
            f"{self.folder}: {self.num_tensors} tensors, {self.num_bytes} bytes, quantisation {self.quantisation}; "
            f"{self.sampled_bytes} bytes of values sampled",
            *(f"note: {note}" for note in self.notes),
            "no problems" if self.ok else f"{count} problem{'' if count == 1 else 's'}\n{described(self.problems)}",
        ]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The report for a program: every problem, none left out."""
        return {
            "folder": str(self.folder),
            "ok": self.ok,
            "problems": [asdict(problem) for problem in self.problems],
            "notes": list(self.notes),
            "facts": dict(self.facts),
            "quantisation": self.quantisation,
            "num_tensors": self.num_tensors,
            "num_bytes": self.num_bytes,
            "sampled_bytes": self.sampled_bytes,
        }


def inspect(folder: Path, expectation: Expectation | None = None, *, sample_bytes: int = SAMPLE_BYTES) -> Report:
    """Validate a checkpoint folder against its own configuration, and that against ``expectation``.

    ``sample_bytes`` bounds the values that are read (0: none). Raises nothing that the folder can cause: what is wrong
    with it is in the report.
    """
    scan = scan_checkpoint(folder)
    if scan.config is None:
        return _report(scan, [], {}, None, 0)
    layout = read_layout(scan.config, scan.problems)
    expected = {} if layout is None else expand(layout, scan.problems)
    scheme = read_scheme(scan.config, expected, scan.tensors, scan.problems) if expected else None
    facts = {} if layout is None else layout.facts
    notes: list[str] = []
    if expectation is not None:
        problems, notes = check_config(scan.config, facts, None if scheme is None else scheme.name, expectation)
        scan.problems += problems
    scales, ids = frozenset[str](), {}
    if scheme is not None and not any(problem.kind == "config.json is refused" for problem in scan.problems):
        compared = compare(expected, scheme, scan.tensors)
        scan.problems += compared.problems
        notes += compared.notes
        scales = frozenset(item.name for item in compared.stored.values() if item.scale_of)
        ids = {item.name: facts["num_experts"] for item in compared.stored.values() if item.ids}
        _check_twins(scan, compared.twins, notes, read=sample_bytes > 0)
    sampled = 0
    if sample_bytes and scan.tensors:
        judged = judged_tensors(scan.tensors, scales, ids)
        sampled = sample_values(scan.folder, judged, sample_bytes, scan.problems)
    return _report(scan, notes, facts, scheme, sampled)


def _check_twins(scan: Scan, twins: Mapping[str, str], notes: list[str], *, read: bool) -> None:
    """A tied head that is stored again must be its embedding to the last byte: some loaders take the one, some the
    other."""
    for head, embedding in twins.items():
        if not read:
            notes.append(f"{head} is stored beside {embedding}, which it is by config.json; not compared")
            continue
        try:
            equal = equal_bytes(scan.folder, scan.tensors[head], scan.tensors[embedding])
        except OSError as error:
            scan.problems.append(Problem("values can't be read", f"{head}: {error}"))
            continue
        if equal:
            notes.append(f"{head} is stored beside {embedding}, which it is by config.json; they are equal")
        else:
            text = f"{head} differs from {embedding}, which it is by tie_word_embeddings"
            scan.problems.append(Problem("tied tensors differ", text))


def _report(scan: Scan, notes: list[str], facts: Mapping[str, Any], scheme: Scheme | None, sampled: int) -> Report:
    index = None
    if scan.config is not None and not scan.problems:
        index = CheckpointIndex(folder=scan.folder, config=scan.config, tensors=scan.tensors)
    return Report(
        folder=scan.folder,
        problems=tuple(scan.problems),
        notes=tuple(notes),
        facts=facts,
        quantisation=None if scheme is None else scheme.name,
        num_tensors=len(scan.tensors),
        num_bytes=sum(entry.end - entry.begin for entry in scan.tensors.values()),
        sampled_bytes=sampled,
        index=index,
    )
