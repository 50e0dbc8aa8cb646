"""Every row of the architecture table: layouts agree in log-probs and gradients, and a "no" is a "no" for a reason."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep.model.architectures import (
    architecture_of,
    choose_packing,
    freeze_untrained,
    known_architectures,
)
from lockstep.train.forward import PolicyForward, by_sequence
from lockstep.train.packing import Layout, WantedTokens, plan
from tests.contract.tiny_models import CONFIGS, tiny_model

ROWS = {row.model_type: row for row in known_architectures()}
NAMES = sorted(ROWS)


def sequences(seed: int = 0) -> list[WantedTokens]:
    """Two groups that share their prompts, one long sequence (compressors and top-k active), one with a late turn."""
    generator = np.random.default_rng(seed)
    found = []
    for prompt_length, lengths in ((11, (3, 1, 7)), (6, (9, 5))):
        prompt = generator.integers(3, 99, prompt_length)
        for length in lengths:
            tokens = np.concatenate([prompt, generator.integers(3, 99, length)]).astype(np.int32)
            wanted = np.arange(len(tokens)) >= prompt_length
            found.append(WantedTokens(tokens, wanted))
    long = generator.integers(3, 99, 45).astype(np.int32)
    found.append(WantedTokens(long, np.arange(45) >= 20))
    turns = np.isin(np.arange(20), [5, 6, 14, 15, 16])
    found.append(WantedTokens(generator.integers(3, 99, 20).astype(np.int32), turns))
    return found


def run(model, layout: Layout, max_tokens: int = 300) -> tuple[dict[tuple[int, int], float], dict[str, torch.Tensor]]:
    """Log-prob by (sequence, position) and the gradient of a weighted sum of them."""
    exact = layout in exact_layouts(model.config.model_type)
    forward = PolicyForward(model, temperature=0.7, chunk_tokens=16, packing=layout if exact else "single")
    model.zero_grad(set_to_none=True)
    found: dict[tuple[int, int], float] = {}
    for batch in plan(sequences(), layout, max_tokens):
        with forward.attention():
            logprobs = forward(batch).logprobs
            weights = torch.from_numpy(np.cos(batch.sequences * 3.0 + batch.positions)).float()
            (logprobs * weights).sum().backward()
        for index, positions, where in by_sequence(batch):
            found |= {(index, int(p)): float(v) for p, v in zip(positions, logprobs[where].detach(), strict=True)}
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found, gradients


def naive(model) -> tuple[dict[tuple[int, int], float], dict[str, torch.Tensor]]:
    """Whole sequences one by one through the model's own forward, softmax over full logits in float64."""
    model.zero_grad(set_to_none=True)
    found: dict[tuple[int, int], float] = {}
    for index, sequence in enumerate(sequences()):
        ids = torch.from_numpy(sequence.tokens).long()[None]
        table = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].double() / 0.7, -1)
        positions = torch.from_numpy(np.flatnonzero(sequence.wanted))
        values = table[positions - 1, ids[0, positions]]
        (values * torch.cos(index * 3.0 + positions.double())).sum().backward()
        found |= {(index, int(p)): float(v) for p, v in zip(positions, values.detach(), strict=True)}
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found, gradients


def differences(left, right) -> tuple[float, float]:
    """Largest log-prob difference; largest gradient difference relative to the parameter's largest gradient."""
    assert left[0].keys() == right[0].keys()
    assert left[1].keys() == right[1].keys()
    logprobs = max(abs(left[0][key] - right[0][key]) for key in left[0])
    scale = max(float(g.abs().max()) for g in right[1].values())
    gradients = max(float((left[1][n] - right[1][n]).abs().max()) for n in left[1])
    return logprobs, gradients / scale


def exact_layouts(name: str) -> list[Layout]:
    row = ROWS[name]
    return ["single"] + ["padded"] * row.right_pads + ["packed", "shared_prompt"] * row.packs  # pyright: ignore


def test_every_row_of_the_table_is_tested_on_a_tiny_model() -> None:
    assert set(CONFIGS) == set(ROWS)


@pytest.mark.parametrize("name", NAMES)
def test_layouts_agree_with_whole_sequences_in_logprobs_and_gradients(name: str) -> None:
    model = tiny_model(name)
    freeze_untrained(model, model.config)
    expected = naive(model)
    for layout in exact_layouts(name):
        logprobs, gradients = differences(run(model, layout), expected)
        assert logprobs < 2e-5, (layout, logprobs)
        assert gradients < 2e-4, (layout, gradients)


@pytest.mark.parametrize("name", [name for name in NAMES if not ROWS[name].packs])
def test_architectures_that_must_not_be_packed_differ_when_packed_all_the_same(name: str) -> None:
    model = tiny_model(name)
    freeze_untrained(model, model.config)
    assert differences(run(model, "packed"), naive(model))[0] > 2e-4


@pytest.mark.parametrize("name", NAMES)
def test_only_the_declared_parameters_get_no_gradient(name: str) -> None:
    model = tiny_model(name)
    _, gradients = naive(model)
    without = {n for n, _ in model.named_parameters() if n not in gradients or not bool(gradients[n].any())}
    assert without == set(freeze_untrained(model, model.config))


def test_frozen_parameters_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("deepseek_v32")
    names = freeze_untrained(model, model.config)
    assert names
    assert all("indexer" in name for name in names)
    assert f"{len(names)} parameters are frozen" in caplog.text


def test_auto_takes_the_densest_exact_layout() -> None:
    chosen = {name: choose_packing("auto", tiny_model(name).config) for name in ("qwen3", "deepseek_v4")}
    assert chosen == {"qwen3": "shared_prompt", "deepseek_v4": "padded"}


def test_unknown_architectures_run_one_sequence_at_a_time() -> None:
    config = tiny_model("qwen3").config
    config.model_type = "something_new"
    assert choose_packing("auto", config) == "single"
    with pytest.raises(ValueError, match="not exact for something_new"):
        choose_packing("padded", config)


def test_a_layout_that_is_not_exact_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="exact layouts: single, padded"):
        choose_packing("packed", tiny_model("deepseek_v4").config)


def test_sliding_windows_forbid_packing() -> None:
    config = tiny_model("mistral", sliding_window=8).config
    assert not architecture_of(config).packs
