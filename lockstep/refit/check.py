"""``lockstep refit check``: does this engine, refitted with this model, compute what the model computes?

::

    model ─┬─ other weights ─▶ run_refit ─▶ engine (random start) ── claims ─┐
           └─ its own       ─▶ run_refit ─▶ the same engine      ── claims ─┼─▶ table; the first module that differs
    disk   ─── a fresh engine loaded from a checkpoint folder ───────────────┘

The trainer's side is transformers' own forward of the model: nothing of Lockstep's trainer is used, so the check stands
beside any trainer whose weights transformers can hold. The two weight sets differ everywhere, which gives both checks
power: whatever does not arrive shows.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.config.schema import ModelSource
from lockstep.interfaces import LogProbs, WeightSource
from lockstep.model.adapter import num_experts, recorded_routes, routers, stacked_routes
from lockstep.model.load import ModelError, load_model, torch_dtype
from lockstep.model.weights import ModelWeights
from lockstep.records import Claim, Sequence
from lockstep.refit.behaves import PATHS, Behaviour, Measured, fitting_bound
from lockstep.refit.bisect import TOLERANCE, Difference, first_difference
from lockstep.refit.names import as_checkpoint, families, named_for
from lockstep.refit.probes import OtherWeights, Probes, holding, indexer_tokens, make_probes
from lockstep.refit.subjects import EngineName, Subject, start_subject
from lockstep.refit.transaction import RefitError, run_refit
from lockstep.refit.transports import make_transport, whole_tensors
from lockstep.refit.verify import claim_loaded
from lockstep.rollout.vllm_folder import write_model_folder

BOUNDS = {"float32": 1e-4, "bfloat16": 0.1}
"""Default bound on the mean difference of log-probs from transformers' forward. Float32 rounding is 1e-7 in a random
model of a few layers, and 1e-5 in a trained one of thirty: random tokens have log-probs of −16 there, and any two
orders of summation, transformers' own among them, differ by that much. bfloat16's is hundredths."""
DISK_BOUNDS = {"float32": 1e-5, "bfloat16": 0.1}
"""The same from an engine loaded from disk: one program on both sides, so mostly no difference at all."""
MAX_CONTEXT = 512
UNPUBLISHED = ("inkling_text",)
"""Published only with towers for pictures and sound: transformers reads the text model alone under module names. Those
are also what is left for a family without a table of names: an engine that reads published ones is then refused."""


@dataclass(frozen=True, slots=True)
class Round:
    """One refit of the check: whose weights, the claims, why it was refused if it was, and where the outputs part from
    those of the disk-loaded engine if a claim failed."""

    weights: str
    claims: tuple[Claim, ...]
    refused: str
    seconds: float
    measured: Measured | None
    first: Difference | None

    @property
    def ok(self) -> bool:
        """Nothing failed, and what the check is for was really looked at."""
        status = {claim.name: claim.status for claim in self.claims}
        looked_at = status.get("behaves") == status.get("disk") == "held"
        return not self.refused and looked_at and "failed" not in status.values()


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Both refits, what the probes cover, and the bound."""

    model: str
    engine: str
    dtype: str
    bound: float
    coverage: str
    rounds: tuple[Round, ...]

    @property
    def ok(self) -> bool:
        """Whether every claim of both refits held."""
        return all(one.ok for one in self.rounds)

    @property
    def first(self) -> Difference | None:
        """The first differing module of the first refit that has one."""
        return next((one.first for one in self.rounds if one.first is not None), None)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rounds = [
            {**asdict(one), "ok": one.ok, "measured": one.measured.as_dict() if one.measured else None}
            for one in self.rounds
        ]
        for one in rounds:  # JSON has no NaN
            if one["first"] and not np.isfinite(one["first"]["largest"]):
                one["first"]["largest"] = str(one["first"]["largest"])
        return {**asdict(self), "rounds": rounds, "ok": self.ok}


def check_refit(
    source: ModelSource,
    engine: EngineName,
    *,
    name: str = "",
    dtype: str = "float32",
    bound: float | None = None,
    seed: int = 0,
    plain_push: bool = False,
    derived: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> CheckResult:
    """Refit ``engine`` twice with the model of ``source`` and compare. Raises ModelError if there is no such model.

    ``plain_push`` and ``derived`` False plant the public faults: tensors pushed without a manifest, and no registry of
    derived state.
    """
    model = load_model(source, torch_dtype(dtype))
    config: Any = model.config.get_text_config()
    context = min(getattr(config, "max_position_embeddings", None) or MAX_CONTEXT, MAX_CONTEXT)
    disk_bound = DISK_BOUNDS[dtype] if bound is None else bound
    bound = BOUNDS[dtype] if bound is None else bound
    probes = make_probes(
        lambda sequences: _own_scores(model, sequences, dtype),
        vocab_size=config.vocab_size,
        num_experts=num_experts(model) if routers(model) else 0,
        context=context,
        model_type=config.model_type,
        indexer_tokens=indexer_tokens(config),
        padding_id=config.pad_token_id,
        seed=seed,
    )
    _own_scores(model, probes.sequences[:1], dtype)  # a dense model was not asked yet
    say(f"{probes.num_tokens} probe tokens through {probes.coverage.text()}")
    options = {"dtype": dtype, "context": context}
    with tempfile.TemporaryDirectory(prefix="lockstep-check-") as temporary:
        subject = start_subject(
            engine, _folder(model, None, Path(temporary) / "dummy"), weights=False, derived=derived, **options
        )
        try:
            rounds = []
            sets = {"other": OtherWeights(ModelWeights(model, version=1)), "model's": ModelWeights(model, version=2)}
            for index, (words, weights) in enumerate(sets.items()):
                folder = _folder(model, weights, Path(temporary) / f"weights-{index}")
                disk = _Disk(lambda folder=folder: start_subject(engine, folder, weights=True, **options), disk_bound)
                round_ = _round(words, model, weights, subject, disk, probes, bound, dtype, plain_push)
                disk.close()
                rounds.append(round_)
                say(f"refit with {words} weights: {'ok' if round_.ok else 'NOT ok'}, {round_.seconds:.1f} s")
        finally:
            subject.close()
    return CheckResult(name, engine, dtype, bound, probes.coverage.text(), tuple(rounds))


def _round(
    words: str,
    model: Any,
    weights: WeightSource,
    subject: Subject,
    disk: _Disk,
    probes: Probes,
    bound: float,
    dtype: str,
    plain_push: bool,
) -> Round:
    start = time.perf_counter()

    def reference(sequences: Seq[Sequence]) -> dict[str, LogProbs]:
        with holding(model, weights):
            return module_scores(model, sequences)

    behaves = Behaviour(probes, subject.engine.score, reference, bound=bound, bound_of="transformers' forward")
    behaves.before()
    refused, claims = "", ()
    if plain_push:
        try:
            subject.push_plain(weights)
        except Exception as error:  # what a loader says to names that it does not know is its own affair
            refused = f"the engine's own loader refuses these names: {type(error).__name__}: {error}"
        else:
            claims = _after_plain_push(weights, subject, behaves)
    else:
        try:
            transport = make_transport("local")
            claims = run_refit(weights, subject.engine.receiver(), transport, verify=True, behaves=behaves).claims
        except RefitError as error:
            refused, claims = ("", error.receipt.claims) if error.receipt else (str(error), ())
    failed = bool(refused) or any(claim.status == "failed" for claim in claims)
    fitting = fitting_bound(disk.bound, behaves.measured.power if behaves.measured else None)
    claims = (*claims, _claim_disk(subject, disk, probes, fitting, refused, failed and not plain_push))
    first = None
    if not refused and any(claim.status == "failed" for claim in claims):
        tokens = max(probes.sequences, key=lambda s: len(s.tokens)).tokens
        first = first_difference(subject.outputs(tokens), disk.outputs(tokens), tolerance=TOLERANCE[dtype])
    return Round(words, claims, refused, time.perf_counter() - start, behaves.measured, first)


def _after_plain_push(weights: WeightSource, subject: Subject, behaves: Behaviour) -> tuple[Claim, ...]:
    """What can be claimed after a push that showed no manifest: nothing was counted, bytes where they are shown."""
    receiver = subject.engine.receiver()
    named = named_for(weights, receiver.naming)
    try:
        loaded = claim_loaded(named.manifest(), named, receiver)
    except RuntimeError as error:
        loaded = Claim("loaded", "not checked", str(error))
    unknown = Claim("covered", "not checked", "a plain push shows no manifest: nobody counted")
    return (unknown, loaded, behaves())


class _Disk:
    """A fresh engine loaded from disk, started when it is first needed; its scores are kept."""

    def __init__(self, start: Callable[[], Subject], bound: float) -> None:
        self._start, self.bound = start, bound
        self._subject: Subject | None = None

    def subject(self) -> Subject:
        if self._subject is None:
            self._subject = self._start()
        return self._subject

    def outputs(self, tokens: np.ndarray) -> Mapping[str, torch.Tensor]:
        return self.subject().outputs(tokens)

    def close(self) -> None:
        if self._subject is not None:
            self._subject.close()
            self._subject = None


def _claim_disk(subject: Subject, disk: _Disk, probes: Probes, bound: float, refused: str, unfit: bool) -> Claim:
    """The engine's log-probs equal those of the same engine that loaded the weights from disk, by both paths."""
    if refused or unfit:
        return Claim("disk", "not checked", "the engine serves nothing after a refit that failed")
    found = []
    for path in PATHS:
        ours = subject.engine.score(probes.sequences, path)
        try:
            theirs = disk.subject().engine.score(probes.sequences, path)
        except RuntimeError as error:
            # DeepSeek-V4 in bfloat16: from disk transformers keeps norms in float32 that its linears don't take.
            return Claim("disk", "not checked", f"a fresh engine loaded from disk can't score at all: {error}")
        d = np.concatenate(
            [
                np.abs(ours[s.sequence_id].logprobs - theirs[s.sequence_id].logprobs)[s.loss_mask]
                for s in probes.sequences
            ]
        )
        found.append((path, float(d.mean())))
    shown = ", ".join(f"{path} {value:.2g}" for path, value in found) + f" against a bound of {bound:.2g}"
    held = all(value <= bound for _, value in found)  # NaN is not
    return Claim("disk", "held" if held else "failed", f"a fresh engine loaded from disk: {shown}")


def module_scores(model: Any, sequences: Seq[Sequence]) -> dict[str, LogProbs]:
    """Log-probs and expert ids by transformers' own forward, one sequence at a time, at temperature 1."""
    scored: dict[str, LogProbs] = {}
    device = next(model.parameters()).device
    experts = num_experts(model) if routers(model) else 0
    for sequence in sequences:
        ids = torch.from_numpy(sequence.tokens.astype(np.int64)).to(device)
        with torch.no_grad(), recorded_routes(model) as records:
            logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].float()
        logprobs = np.full(len(sequence.tokens), np.nan, dtype=np.float32)
        logprobs[1:] = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].cpu().numpy()
        routes = stacked_routes([layer[0] for layer in records], experts) if experts else None
        scored[sequence.sequence_id] = LogProbs(logprobs, 0, routes)
    return scored


def _own_scores(model: Any, sequences: Seq[Sequence], dtype: str) -> dict[str, LogProbs]:
    """Raises ModelError where transformers' forward does not run in this dtype."""
    try:
        return module_scores(model, sequences)
    except RuntimeError as error:
        raise ModelError(
            f"transformers' own forward of {type(model).__name__} fails in {dtype}: {error}; try another --dtype"
        ) from error


def _folder(model: Any, weights: WeightSource | None, folder: Path) -> Path:
    """A checkpoint folder under published names, as far as there are some; without weights if there are none."""
    from safetensors.torch import save_file

    write_model_folder(model, folder)
    if weights is not None:
        model_type = weights.manifest().model_type
        published = model_type in families() and model_type not in UNPUBLISHED
        named = as_checkpoint(weights) if published else weights
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in whole_tensors(named)}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# --- shown ------------------------------------------------------------------------------------------------------------


def as_text(result: CheckResult) -> str:
    """The claims of both refits as a table, then the verdict."""
    rows = [("weights", "claim", "status", "found")]
    for one in result.rounds:
        if one.refused:
            rows.append((one.weights, "", "REFUSED", one.refused))
        rows += [
            (one.weights, claim.name, claim.status.upper() if claim.status == "failed" else claim.status, claim.detail)
            for claim in one.claims
        ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows
    ]
    return "\n".join([*lines, "", _verdict(result)])


def _verdict(result: CheckResult) -> str:
    what = f"{result.model or 'the model'} refitted into {result.engine} in {result.dtype}"
    if result.ok:
        return f"{what}: every claim held, twice, with different weights"
    if result.first is not None:
        return f"{what}: FAILED. First module whose output differs: {result.first.text()}"
    if any(one.refused for one in result.rounds):
        return f"{what}: REFUSED. See why above"
    if any(claim.status == "failed" for one in result.rounds for claim in one.claims):
        return f"{what}: FAILED. See the claims; no module's output differs from that of the disk-loaded engine"
    return f"{what}: NOT PROVED. Nothing was found wrong in what could be looked at; see what was not checked"
