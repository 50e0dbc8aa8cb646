"""From a problem to prompt tokens, in one place for every path: training, evaluation, supervised steps.

The text is rendered whole and tokenised in one go. BOS is decided on the ids, never by looking at the text: templates
add it in ways that defeat text heuristics (NVIDIA-NeMo/RL#855), raw prompts lose it (huggingface/trl#3520).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from lockstep.config.schema import PromptConfig
from lockstep.records import IntArray, Problem
from lockstep.tasks.errors import TaskError
from lockstep.tasks.templates import Message, find_inserted_system


class PromptTokenizer(Protocol):
    """What a prompt needs of a tokenizer: transformers' tokenizers have it, and so has ``CharacterTokenizer``."""

    @property
    def bos_token_id(self) -> Any: ...

    @property
    def chat_template(self) -> Any:
        """None: ``apply_chat_template`` is not called."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


class ChatTokenizer(PromptTokenizer, Protocol):
    """A tokenizer with a chat template."""

    @property
    def bos_token(self) -> Any: ...

    def apply_chat_template(self, conversation: Any, **arguments: Any) -> Any: ...

    def get_added_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Prompt tokens [P] int32, never empty, and the text that they were made from (without a BOS added on ids)."""

    tokens: IntArray
    text: str
    truncated: bool


class PromptRenderer:
    """Renders problems. ``num_skipped`` and ``num_truncated`` count what became of over-long ones.

    Over-long prompts cut at the left lose text of their oldest messages (system messages stay), whole characters and
    whole special tokens at a time, and are rendered again: all markers of the template are intact.
    Special tokens that a prompt's own text spells out become special tokens, as everywhere in transformers.

    ``num_embeddings``: rows of the model's embedding; a prompt with a token beyond them is refused. None: not checked.
    Raises TaskError at once where a setting can't have its effect with this tokenizer.
    """

    def __init__(self, tokenizer: Any, config: PromptConfig, *, num_embeddings: int | None = None) -> None:
        self.config = config
        self._num_embeddings = num_embeddings
        self.num_skipped = 0
        self.num_truncated = 0
        self._tokenizer: PromptTokenizer = tokenizer
        self._chat = cast(ChatTokenizer, tokenizer) if tokenizer.chat_template is not None else None
        self._bos: int | None = tokenizer.bos_token_id
        self._arguments = {} if config.thinking is None else {"enable_thinking": config.thinking}
        self._inserted = None
        self._check_settings()
        if config.format == "chat" and config.system is None and not config.template_default_system:
            assert self._chat is not None
            self._inserted = find_inserted_system(self._probe, self._chat.bos_token)
        self._bos_asked = self._bos is not None and tokenizer.encode("a", add_special_tokens=True)[:1] == [self._bos]
        self._bos_opens_turns = self._find_bos_in_turns()
        self._specials = tuple(self._chat.get_added_vocab()) if self._chat is not None else ()

    def render(self, problem: Problem) -> RenderedPrompt | None:
        """The prompt, or None if it is over-long and to be skipped. Raises TaskError naming the problem."""
        messages = self._messages(problem)
        text, ids = self._render(messages, problem)
        truncated = False
        if len(ids) > self.config.max_tokens:
            if self.config.overlong == "skip":
                self.num_skipped += 1
                return None
            if self.config.overlong == "refuse":
                raise TaskError(
                    f"problem {problem.problem_id}: its prompt has {len(ids)} tokens, prompt.max_tokens is "
                    f"{self.config.max_tokens}. Raise it, or set prompt.overlong to 'skip' or 'truncate_left'"
                )
            text, ids = self._truncate(messages, problem, len(ids))
            self.num_truncated += 1
            truncated = True
        if not ids:
            raise TaskError(f"problem {problem.problem_id}: its prompt has no tokens; there is nothing to continue")
        return RenderedPrompt(np.asarray(ids, dtype=np.int32), text, truncated)

    def _check_settings(self) -> None:
        config = self.config
        if config.add_bos == "always" and self._bos is None:
            raise TaskError("prompt.add_bos = 'always', but the tokenizer has no BOS token; set 'auto' or 'never'")
        if config.format == "raw":
            given = {"prompt.system": config.system, "prompt.thinking": config.thinking}
            idle = [key for key, value in given.items() if value is not None]
            if idle:
                raise TaskError(f"{' and '.join(idle)}: no effect with prompt.format = 'raw'; remove, or set 'chat'")
            return
        if self._chat is None:
            raise TaskError("prompt.format = 'chat', but the tokenizer has no chat template; set prompt.format = 'raw'")
        if config.thinking is not None:
            messages = [{"role": "user", "content": "a"}]
            on, off = (
                self._chat.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, enable_thinking=switch
                )
                for switch in (True, False)
            )
            if on == off:
                raise TaskError("prompt.thinking is set, but the chat template does not heed enable_thinking; unset it")

    def _probe(self, messages: list[Message]) -> str:
        assert self._chat is not None
        return self._chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=False, **self._arguments)

    def _find_bos_in_turns(self) -> bool:
        """Whether the BOS token also opens turns (SmolLM2's is <|im_start|>): it is a marker then, not ours to move."""
        if self._chat is None or self._bos is None:
            return False
        probe = self._chat.apply_chat_template(
            [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True, **self._arguments
        )
        return self._bos in self._tokenizer.encode(probe, add_special_tokens=False)[2:]

    def _messages(self, problem: Problem) -> list[Message]:
        """The conversation; for format "raw" one message whose content is the prompt."""
        prompt = problem.prompt
        if isinstance(prompt, str):
            messages: list[Message] = [{"role": "user", "content": prompt}]
        elif self.config.format == "raw":
            raise TaskError(
                f"problem {problem.problem_id} has chat messages, but prompt.format is 'raw'; set 'chat' or give a text"
            )
        else:
            messages = [dict(message) for message in prompt]
        if self.config.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.config.system})
        return messages

    def _render(self, messages: list[Message], problem: Problem) -> tuple[str, list[int]]:
        if self.config.format == "raw":
            text = str(messages[0]["content"])
        else:
            assert self._chat is not None
            try:
                text = self._chat.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **self._arguments
                )
            except Exception as error:
                raise TaskError(f"problem {problem.problem_id}: the chat template refuses it: {error}") from error
            if self._inserted is not None and messages[0]["role"] != "system":
                text = self._inserted.remove_from(text)
        text += self.config.suffix
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, ValueError) as error:  # TypeError: transformers' word for half a surrogate pair
            raise TaskError(f"problem {problem.problem_id}: the tokenizer refuses its text: {error}") from error
        ids = self._with_right_bos(ids)
        if self._num_embeddings is not None and ids and max(ids) >= self._num_embeddings:
            raise TaskError(
                f"problem {problem.problem_id}: its token {max(ids)} has no row in the model's embedding of "
                f"{self._num_embeddings}: tokenizer and model don't belong together"
            )
        return text, ids

    def _with_right_bos(self, ids: list[int]) -> list[int]:
        """Exactly one BOS in front where there should be one. A template that writes one itself is right to."""
        if self._bos is None:
            return ids
        num_leading = next((i for i, token in enumerate(ids) if token != self._bos), len(ids))
        if self.config.add_bos == "never":
            return ids if self._bos_opens_turns else ids[num_leading:]
        if num_leading or self._bos_asked or self.config.add_bos == "always":
            return [self._bos, *ids[num_leading:]]
        return ids

    def _truncate(self, messages: list[Message], problem: Problem, num_tokens: int) -> tuple[str, list[int]]:
        """The least cut at the left that fits, by bisection over characters."""
        total = sum(len(str(message["content"])) for message in messages if message["role"] != "system")
        low, high = 0, total - 1  # a cut of `low` is too little; at least one character stays
        best = self._render(self._cut(messages, high), problem) if high > 0 else None
        if best is None or len(best[1]) > self.config.max_tokens:
            frame = "" if best is None else f"; without it {len(best[1])} tokens are left"
            raise TaskError(
                f"problem {problem.problem_id}: its prompt has {num_tokens} tokens and can't be cut to "
                f"prompt.max_tokens {self.config.max_tokens} without cutting the chat template's or the "
                f"system message's own text{frame}"
            )
        while high - low > 1:
            middle = (low + high) // 2
            attempt = self._render(self._cut(messages, middle), problem)
            if len(attempt[1]) <= self.config.max_tokens:
                best, high = attempt, middle
            else:
                low = middle
        return best

    def _cut(self, messages: Seq[Message], num_characters: int) -> list[Message]:
        """Messages without the first ``num_characters`` of their text, system messages left alone."""
        result = []
        for message in messages:
            content = str(message["content"])
            if message["role"] == "system" or num_characters == 0:
                result.append(message)
                continue
            here = min(num_characters, len(content))
            num_characters -= here
            result.append({**message, "content": content[self._whole_special(content, here) :]})
        return result

    def _whole_special(self, content: str, cut: int) -> int:
        """``cut``, or the end of the special token of the content that it would split."""
        for special in self._specials:
            start = content.find(special, max(0, cut - len(special) + 1), cut + len(special) - 1)
            if 0 <= start < cut:
                return start + len(special)
        return cut
