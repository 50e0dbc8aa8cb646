"""From the text of a script to tokens: words with their parts, operators, redirections and here-documents."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lockstep.topology.shell_syntax import (
    MAX_CHARACTERS,
    MAX_NESTING,
    Arithmetic,
    Literal,
    Parameter,
    Part,
    Redirect,
    ShellError,
    Substitution,
    Word,
)

_OPERATORS = ("&&", "||", ";;&", ";;", ";&", "|&", ";", "&", "|", "(", ")")
_REDIRECT = re.compile(r"(?:[0-9]+|\{[A-Za-z_]\w*\})?(<<<|<<-|<<|<&|<>|>>|>&|>\||&>>|&>|<|>)(?!\()")
_ENDS_WORD = set(" \t\n;&|()<>")
_SPECIAL = set("@*#?-$!0123456789")
_ASSIGNS_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=$")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "e": "\x1b"}


@dataclass(frozen=True, slots=True)
class Token:
    """A word, a redirection or an operator by its text ("\\n" ends a line, "" the script)."""

    line: int
    operator: str | None = None
    word: Word | None = None
    redirect: Redirect | None = None


class Scanner:
    """Tokens of ``text``, one at a time. ``line`` is the number of the text's first line."""

    def __init__(self, text: str, line: int = 1, depth: int = 0) -> None:
        if len(text) > MAX_CHARACTERS:
            raise ShellError(line, f"{len(text)} characters: at most {MAX_CHARACTERS} are read")
        if "\0" in text:
            raise ShellError(line, "a NUL character: this is no script")
        if depth > MAX_NESTING:
            raise ShellError(line, f"expansions nested deeper than {MAX_NESTING}")
        self.text = text
        self.position = 0
        self.depth = depth
        self._first_line = line
        self._counted = 0
        self._lines = 0
        self._documents_end = 0

    @property
    def line(self) -> int:
        """The line of the current position."""
        if self.position >= self._counted:
            self._lines += self.text.count("\n", self._counted, self.position)
        else:
            self._lines = self.text.count("\n", 0, self.position)
        self._counted = self.position
        return self._first_line + self._lines

    def starts_with(self, text: str) -> bool:
        """Whether the rest begins with this, blanks left out."""
        self._skip_blanks()
        return self.text.startswith(text, self.position)

    def next(self) -> Token:
        """The next token; the last one is the operator "". Raises ``ShellError`` for what is never closed."""
        self._skip_blanks()
        line = self.line
        if self.position >= len(self.text):
            return Token(line, operator="")
        if self.text[self.position] == "\n":
            self.position = max(self.position + 1, self._documents_end)
            return Token(line, operator="\n")
        if match := _REDIRECT.match(self.text, self.position):
            self.position = match.end()
            return Token(line, redirect=self._redirect(match.group(1)))
        if self.text[self.position] in ";&|()":
            operator = next(text for text in _OPERATORS if self.text.startswith(text, self.position))
            self.position += len(operator)
            return Token(line, operator=operator)
        return Token(line, word=self.word())

    def calculation(self) -> str | None:
        """The body of ``((…))`` that stands here, None if it isn't one."""
        if not self.starts_with("(("):
            return None
        end = self._closing_arithmetic(self.position + 2)
        if end is None:
            return None
        body = self.text[self.position + 2 : end]
        self.position = end + 2
        return body

    def word(self) -> Word:
        """The word that begins here; ``name=(…)`` with its elements."""
        line = self.line
        parts: list[Part] = []
        plain: list[str] = []
        while self.position < len(self.text):
            char = self.text[self.position]
            if char == "(" and not parts and _ASSIGNS_ARRAY.match("".join(plain)):
                self.position += 1
                return Word((Literal("".join(plain)),), line, self._elements())
            if char in "<>" and self.text.startswith("(", self.position + 1) and not plain:
                parts.append(self._substitution(self.position, 2, quoted=False))
                continue
            if char in _ENDS_WORD:
                break
            part = self._part(char)
            if isinstance(part, str):
                plain.append(part)
                continue
            if plain:
                parts.append(Literal("".join(plain)))
                plain = []
            parts.extend(part)
        if plain:
            parts.append(Literal("".join(plain)))
        return Word(tuple(parts), line)

    def _part(self, char: str) -> str | list[Part]:
        """One unquoted character, or the parts of what is quoted or expanded here."""
        if char == "\\":
            self.position += 2
            escaped = self.text[self.position - 1 : self.position]
            return "" if escaped == "\n" else [Literal(escaped, quoted=True)]
        if char == "'":
            end = self._find("'", self.position + 1)
            body = self.text[self.position + 1 : end]
            self.position = end + 1
            return [Literal(body, quoted=True)]
        if self.text.startswith("$'", self.position):
            return [self._ansi_quote()]
        if char == '"' or self.text.startswith('$"', self.position):
            self.position += 1 if char == '"' else 2
            return self.quoted('"')
        if char in "$`":
            found = self._expansion(quoted=False)
            if found is not None:
                return [found]
        self.position += 1
        return char

    def quoted(self, closing: str | None) -> list[Part]:
        """Parts up to the closing double quote (None: to the end, as in a here-document)."""
        opened = self.line
        parts: list[Part] = [Literal("", quoted=True)]
        plain: list[str] = []
        while self.position < len(self.text):
            char = self.text[self.position]
            if char == closing:
                self.position += 1
                return [*parts, Literal("".join(plain), quoted=True)]
            if char == "\\" and self.text[self.position + 1 : self.position + 2] in ("$", "`", '"', "\\", "\n"):
                escaped = self.text[self.position + 1]
                keeps = escaped == '"' and closing is None
                plain.append("" if escaped == "\n" else f"\\{escaped}" if keeps else escaped)
                self.position += 2
                continue
            found = self._expansion(quoted=True) if char in "$`" else None
            if found is None:
                plain.append(char)
                self.position += 1
                continue
            parts += [Literal("".join(plain), quoted=True), found]
            plain = []
        if closing is not None:
            raise ShellError(opened, f"a {closing} is never closed")
        return [*parts, Literal("".join(plain), quoted=True)]

    def _expansion(self, quoted: bool) -> Part | None:
        """What ``$`` or a backquote begins; None for a ``$`` that stands for itself."""
        start = self.position
        rest = self.text[start : start + 3]
        if rest.startswith("`"):
            end = start + 1
            while (end := self._find("`", end)) and self.text[end - 1] == "\\":
                end += 1
            self.position = end + 1
            return Substitution(self.text[start + 1 : end], quoted, self.text[start : end + 1])
        if rest == "$((":
            end = self._closing_arithmetic(start + 3)
            if end is not None:
                self.position = end + 2
                return Arithmetic(self.text[start + 3 : end], quoted, self.text[start : end + 2])
        if rest.startswith("$("):
            return self._substitution(start, 2, quoted)
        if rest.startswith("${"):
            end = self._closing_brace(start + 2)
            self.position = end + 1
            return Parameter(self.text[start + 2 : end], quoted, self.text[start : end + 1])
        match = re.compile(r"\$([A-Za-z_]\w*)").match(self.text, start)
        if match:
            self.position = match.end()
            return Parameter(match.group(1), quoted, match.group())
        if rest[1:2] and rest[1] in _SPECIAL:
            self.position = start + 2
            return Parameter(rest[1], quoted, rest[:2])
        return None

    def _substitution(self, start: int, opening: int, quoted: bool) -> Substitution:
        """A command in parentheses: scanned, so that quotes and here-documents in it are respected."""
        inner = Scanner(self.text, depth=self.depth + 1)
        inner.position = start + opening
        inner._documents_end = self._documents_end
        opened, depth, cases = self.line, 1, 0
        while depth:
            token = inner.next()
            if token.operator == "":
                raise ShellError(opened, f"{self.text[start : start + opening]} is never closed")
            if token.operator == "(":
                depth += 1
            elif token.operator == ")" and not (cases and depth == 1):
                depth -= 1
            elif token.word is not None and token.word.plain in ("case", "esac"):
                cases = max(0, cases + (1 if token.word.plain == "case" else -1))
        self.position = inner.position
        body = self.text[start + opening : self.position - 1]
        return Substitution(body, quoted, self.text[start : self.position])

    def _closing_brace(self, position: int) -> int:
        inner = Scanner(self.text, depth=self.depth + 1)
        inner.position = position
        while inner.position < len(self.text):
            char = self.text[inner.position]
            if char == "}":
                return inner.position
            if char in "\\'\"$`":
                inner._part(char)
            else:
                inner.position += 1
        raise ShellError(self.line, "${ is never closed")

    def _closing_arithmetic(self, position: int) -> int | None:
        """Where the ``))`` of an arithmetic expression stands; None if its parentheses don't end with one."""
        depth = 0
        for index in range(position, len(self.text)):
            char = self.text[index]
            if char == "(":
                depth += 1
            elif char == ")" and depth:
                depth -= 1
            elif char == ")":
                return index if self.text.startswith("))", index) else None
        return None

    def _elements(self) -> tuple[Word, ...]:
        """The words of an array, up to its parenthesis."""
        opened = self.line
        words: list[Word] = []
        while True:
            token = self.next()
            if token.word is not None:
                words.append(token.word)
            elif token.operator == ")":
                return tuple(words)
            elif token.operator != "\n":
                raise ShellError(opened, "an array's ( is never closed" if token.operator == "" else "odd array")

    def _redirect(self, operator: str) -> Redirect:
        self._skip_blanks()
        target = self.word()
        if operator not in ("<<", "<<-"):
            return Redirect(operator, target)
        raw = any(isinstance(part, Literal) and part.quoted for part in target.parts)
        delimiter = "".join(part.text if isinstance(part, Literal) else part.source for part in target.parts)
        return Redirect(operator, self._document(operator, delimiter, target.line, raw), raw)

    def _document(self, operator: str, delimiter: str, line: int, raw: bool) -> Word:
        """The here-document that begins on the next line, expanded unless ``raw``."""
        start = self._documents_end
        if start <= self.position:
            newline = self.text.find("\n", self.position)
            start = len(self.text) if newline < 0 else newline + 1
        first_line = self._first_line + self.text.count("\n", 0, start)
        position, lines = start, []
        while position < len(self.text):
            end = self.text.find("\n", position)
            end = len(self.text) if end < 0 else end
            row = self.text[position:end]
            position = min(end + 1, len(self.text))
            row = row.lstrip("\t") if operator == "<<-" else row
            if row == delimiter:
                break
            lines.append(row + "\n")
        else:
            raise ShellError(line, f"the here-document's end {delimiter!r} is missing")
        self._documents_end = position
        body = "".join(lines)
        if raw:
            return Word((Literal(body, quoted=True),), first_line)
        return Word(tuple(Scanner(body, first_line, self.depth + 1).quoted(None)), first_line)

    def _ansi_quote(self) -> Literal:
        """``$'…'`` with the escapes that launch scripts use."""
        chars: list[str] = []
        position = self.position + 2
        while (char := self.text[position : position + 1]) != "'":
            if not char:
                raise ShellError(self.line, "a $' is never closed")
            if char == "\\":
                escaped = self.text[position + 1 : position + 2]
                chars.append(_ESCAPES.get(escaped, f"\\{escaped}"))
                position += 1
            else:
                chars.append(char)
            position += 1
        self.position = position + 1
        return Literal("".join(chars), quoted=True)

    def _find(self, char: str, position: int) -> int:
        found = self.text.find(char, position)
        if found < 0:
            raise ShellError(self.line, f"a {char} is never closed")
        return found

    def _skip_blanks(self) -> None:
        while self.position < len(self.text):
            char = self.text[self.position]
            if char in " \t\r":
                self.position += 1
            elif self.text.startswith("\\\n", self.position):
                self.position += 2
            elif char == "#" and self._begins_token():
                end = self.text.find("\n", self.position)
                self.position = len(self.text) if end < 0 else end
            else:
                return

    def _begins_token(self) -> bool:
        return self.position == 0 or self.text[self.position - 1] in " \t\n;&|()"
