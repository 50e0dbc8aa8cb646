"""The grammar of launch scripts: text of a POSIX or bash script → commands whose words are still unexpanded.

Only what a reader needs is here: words with quotes and expansions, arrays, redirections with here-documents, lists,
pipelines, if, for, while, case, groups and functions. Nothing is run and nothing is expanded: `shell_words.py`
expands words and `shell_script.py` follows the commands. Every size is bounded, so that a hostile text is an error.
Source of the grammar: POSIX.1-2024 Shell Command Language 2.3 to 2.10, and the bash manual for arrays, ``[[``, ``((``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_CHARACTERS = 1 << 18
MAX_NESTING = 40

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ShellError(ValueError):
    """A text that is no shell script, or is beyond a bound. ``line`` counts from 1."""

    def __init__(self, line: int, message: str) -> None:
        self.line = line
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Literal:
    """Characters that stand for themselves."""

    text: str
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """``$name`` or ``${…}``. ``body`` is what stands between the braces, still to be read; ``source`` as written."""

    body: str
    quoted: bool
    source: str


@dataclass(frozen=True, slots=True)
class Substitution:
    """``$(…)``, backquotes or ``<(…)``: a command, which is never run."""

    body: str
    quoted: bool
    source: str


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """``$((…))``."""

    body: str
    quoted: bool
    source: str


Part = Literal | Parameter | Substitution | Arithmetic


@dataclass(frozen=True, slots=True)
class Word:
    """A word. ``elements`` is set for ``name=(…)``, an array's assignment."""

    parts: tuple[Part, ...]
    line: int
    elements: tuple[Word, ...] | None = None

    @property
    def plain(self) -> str | None:
        """The text of a word without quotes and expansions, else None."""
        if all(isinstance(part, Literal) and not part.quoted for part in self.parts):
            return "".join(part.text for part in self.parts if isinstance(part, Literal))
        return None


@dataclass(frozen=True, slots=True)
class Redirect:
    """A redirection. For ``<<`` and ``<<-``, ``word`` is the body; ``raw``: its delimiter was quoted."""

    operator: str
    word: Word
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Simple:
    """A simple command: leading assignments and words together, in order."""

    words: tuple[Word, ...]
    redirects: tuple[Redirect, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Test:
    """``[[ … ]]``: its words."""

    words: tuple[Word, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Calculation:
    """``(( … ))``."""

    body: str
    line: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands joined by ``|``."""

    commands: tuple[Command, ...]
    negated: bool
    line: int


@dataclass(frozen=True, slots=True)
class Chain:
    """``first && second || third``: each operator with the pipeline after it."""

    first: Pipeline
    rest: tuple[tuple[str, Pipeline], ...]


@dataclass(frozen=True, slots=True)
class If:
    """``if``: (condition, body) in order; the last condition is None for ``else``."""

    clauses: tuple[tuple[Block | None, Block], ...]
    line: int


@dataclass(frozen=True, slots=True)
class For:
    """``for name in words`` (``words`` None: the positional parameters)."""

    name: str
    words: tuple[Word, ...] | None
    body: Block
    line: int


@dataclass(frozen=True, slots=True)
class Loop:
    """``while`` and ``until``, and ``for ((first; condition; step))``."""

    condition: Block
    body: Block
    until: bool
    line: int
    first: str = ""
    step: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """``case word in pattern) body ;; …``."""

    word: Word
    arms: tuple[tuple[tuple[Word, ...], Block], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Group:
    """``{ … }`` or, in a subshell, ``( … )``."""

    body: Block
    subshell: bool
    redirects: tuple[Redirect, ...] = ()
    line: int = 0


@dataclass(frozen=True, slots=True)
class Function:
    """A function's definition."""

    name: str
    body: Block
    line: int


@dataclass(frozen=True, slots=True)
class Block:
    """Commands in order."""

    chains: tuple[Chain, ...] = ()


Command = Simple | Test | Calculation | If | For | Loop | Case | Group | Function
