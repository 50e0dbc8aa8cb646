"""What tokenizer and models of a run must have in common is checked before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.schema import (
    ArithmeticTask,
    BoundConfig,
    GateConfig,
    ModelSource,
    PathModel,
    PromptConfig,
    RandomModel,
    RolloutConfig,
    RunConfig,
    SupervisedConfig,
    TrainerConfig,
)
from lockstep.driver import assembly
from lockstep.driver.assembly import assembled
from lockstep.model.characters import CharacterTokenizer
from lockstep.model.load import ModelError, load_model
from lockstep.tasks.errors import TaskError
from tests.contract.tiny_models import CONFIGS


def source(**fields: Any) -> RandomModel:
    return RandomModel(model_type="llama", config={**CONFIGS["llama"], **fields})


def config(**changes: Any) -> RunConfig:
    plain = RunConfig(
        name="tiny",
        steps=1,
        threads=1,
        model=source(),
        prompt=PromptConfig(format="raw"),
        task=ArithmeticTask(template="{a}{op}{b}=", num_heldout=4),
        rollout=RolloutConfig(dtype="float32"),
        trainer=TrainerConfig(dtype="float32"),
        gate=GateConfig(bounds=(BoundConfig(bound=1e-4, evidence="float32 on both sides"),)),
    )
    return plain.model_copy(update=changes)


def told(settings: RunConfig) -> list[str]:
    lines: list[str] = []
    with assembled(settings, lines.append, warm_up=True):
        return lines


class OtherTokenizer(CharacterTokenizer):
    """Two tokens the other way round."""

    def get_vocab(self) -> dict[str, int]:
        return super().get_vocab() | {"a": 70, "b": 69}


class FewerTokens(CharacterTokenizer):
    """Knows the first tokens alone."""

    def get_vocab(self) -> dict[str, int]:
        return {token: index for token, index in super().get_vocab().items() if index < 50}


def given_tokenizers(monkeypatch: pytest.MonkeyPatch, by_seed: Mapping[int, Any]) -> None:
    def load(one: ModelSource) -> Any:
        return by_seed[one.seed] if isinstance(one, RandomModel) else original(one)

    original = assembly.load_tokenizer
    monkeypatch.setattr(assembly, "load_tokenizer", load)


def scored_by(section: str, model: ModelSource) -> RunConfig:
    plain = config()
    kl = plain.algorithm.kl.model_copy(update={"place": "loss", "coefficient": 0.1})
    changes: dict[str, Any] = {"kl": kl} if section == "reference" else {"advantage": "distill"}
    return config(**{section: model}, algorithm=plain.algorithm.model_copy(update=changes))


@pytest.mark.parametrize("section", ["reference", "teacher"])
def test_a_model_that_reads_other_tokens_is_no_reference_and_no_teacher(
    section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log-probs were those of other texts, and training went on."""
    other = source().model_copy(update={"seed": 1})
    given_tokenizers(monkeypatch, {0: CharacterTokenizer(), 1: OtherTokenizer()})
    with pytest.raises(ModelError, match=f"^{section}: token 69 is 'b' there and 'a' to the policy; use a model with"):
        told(scored_by(section, other))
    given_tokenizers(monkeypatch, {0: CharacterTokenizer(), 1: FewerTokens()})
    told(scored_by(section, other))
    with pytest.raises(ModelError, match=f"^{section}: its head has 60 rows, fewer than the 99 tokens"):
        told(scored_by(section, source(vocab_size=60)))


@pytest.mark.parametrize("section", ["reference", "teacher"])
def test_a_scorer_with_a_shorter_context_is_refused(section: str) -> None:
    """With rotary positions it scored what it was never trained on; with learned ones it was an IndexError."""
    short = source(max_position_embeddings=100)
    settings = scored_by(section, short)  # the policy's context is 512
    with pytest.raises(ModelError, match=f"^{section}: its context is 100 tokens, .* can have 512; lower prompt.max_"):
        told(settings)
    told(settings.model_copy(update={"model": short}))
    prompt = PromptConfig(format="raw", max_tokens=40)
    rollout = RolloutConfig(dtype="float32", max_new_tokens=60)
    told(settings.model_copy(update={"prompt": prompt, "rollout": rollout}))


def test_a_reference_without_a_tokenizer_is_taken_on_trust_aloud(tmp_path: Path) -> None:
    load_model(source(), torch.float32).save_pretrained(tmp_path)
    lines = told(scored_by("reference", PathModel(path=str(tmp_path))))
    assert any(line.startswith("reference: that its tokens mean") and "on trust" in line for line in lines)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_where_one_is_used() -> None:
    with pytest.raises(TaskError, match="its token 33 has no row in the model's embedding of 20: tokenizer and model"):
        told(config(model=source(vocab_size=20)))


def test_a_reference_answer_beyond_the_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    supervised = SupervisedConfig(steps=1, batch_size=2)
    beyond = CharacterTokenizer()
    beyond.eos_token_id = 99
    given_tokenizers(monkeypatch, {0: beyond})
    with pytest.raises(TaskError, match="token 99 of its reference answer has no row in the model's vocabulary of 99"):
        told(config(supervised=supervised))


def test_a_tokenizer_without_an_end_is_told_and_can_t_be_taught_one(monkeypatch: pytest.MonkeyPatch) -> None:
    endless: Any = CharacterTokenizer()
    endless.eos_token_id = None
    given_tokenizers(monkeypatch, {0: endless})
    monkeypatch.setattr(assembly, "load_model", without_end(assembly.load_model))
    assert any("no token ends a completion" in line for line in told(config()))
    with pytest.raises(TaskError, match=r"no end-of-sequence token to teach; set supervised.steps = 0"):
        told(config(supervised=SupervisedConfig(steps=1, batch_size=2)))


def without_end(load: Any) -> Any:
    def loaded(*arguments: Any, **named: Any) -> Any:
        model = load(*arguments, **named)
        model.generation_config.eos_token_id = None
        return model

    return loaded


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_a_bidirectional_model_is_refused_before_a_run_is_built_on_it(model_type: str) -> None:
    sizes = {name: CONFIGS["llama"][name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    model = RandomModel(model_type=model_type, config={**sizes, "num_attention_heads": 4})
    with pytest.raises(ModelError, match="bidirectional"):
        told(config(model=model))
