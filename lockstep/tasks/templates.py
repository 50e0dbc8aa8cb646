"""What a chat template does by itself: does it insert a system message where there is none, and which text is that?

Found out by rendering marked conversations, so that it holds for any template without reading its source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.tasks.errors import TaskError

Message = dict[str, object]

_USER, _ASSISTANT, _LATER, _SYSTEM = "⟦first⟧", "⟦reply⟧", "⟦second⟧", "⟦system⟧"


@dataclass(frozen=True, slots=True)
class InsertedSystem:
    """The text in front of the first user turn that a template inserts by itself, and what of it must stay (BOS)."""

    text: str
    kept: str

    def remove_from(self, rendered: str) -> str:
        """``rendered`` without the inserted message. Raises TaskError if it does not begin with it."""
        if not rendered.startswith(self.text):
            raise TaskError(
                f"the chat template's own system message {self.text!r} is not where it was found before; the prompt "
                f"begins {rendered[: len(self.text)]!r}. Keep it (prompt.template_default_system = true) or set "
                "prompt.system"
            )
        return self.kept + rendered[len(self.text) :]


def find_inserted_system(render: Callable[[list[Message]], str], bos_token: str | None) -> InsertedSystem | None:
    """The system message that a template inserts when there is none; None if it inserts none.

    ``render`` gives the text of a conversation without a generation prompt. Raises TaskError where there is one that
    can't be told apart from what follows it.
    """
    bos = bos_token or ""
    chat = render([_message("user", _USER), _message("assistant", _ASSISTANT), _message("user", _LATER)])
    if not all(chat.count(mark) == 1 for mark in (_USER, _ASSISTANT, _LATER)):
        raise _cannot("it does not render a conversation turn by turn")
    opening = chat.partition(_USER)[0]
    between = chat.partition(_ASSISTANT)[2].partition(_LATER)[0]
    if between.endswith((opening, opening.removeprefix(bos))):
        return None  # the first user turn opens as the second does
    plain = render([_message("user", _USER)])
    try:
        alone = render([_message("system", _SYSTEM)])
        given = render([_message("system", _SYSTEM), _message("user", _USER)])
    except Exception as error:
        raise _cannot(f"it does not render a system message: {error}") from error
    before, mark, after = alone.partition(_SYSTEM)
    turn = given.removeprefix(alone)
    inserted = plain.removesuffix(turn)
    if not mark or turn == given or inserted == plain:
        raise _cannot("its system message has no text of its own")
    if not inserted:
        return None
    if not (inserted.startswith(before) and inserted.endswith(after)):
        raise _cannot(f"it begins with {inserted!r}, which is not how it renders a system message")
    return InsertedSystem(inserted, bos if inserted.startswith(bos) and not turn.startswith(bos) else "")


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _cannot(reason: str) -> TaskError:
    return TaskError(
        "prompt.template_default_system = false: the system message that the chat template inserts can't be removed, "
        f"because {reason}. Keep it (true) or set prompt.system"
    )
