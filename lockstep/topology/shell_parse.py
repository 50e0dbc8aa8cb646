"""From tokens to commands: a recursive-descent parser for what launch scripts are written in."""

from __future__ import annotations

import re

from lockstep.topology.shell_scan import Scanner, Token
from lockstep.topology.shell_syntax import (
    MAX_NESTING,
    Block,
    Calculation,
    Case,
    Chain,
    Command,
    For,
    Function,
    Group,
    If,
    Literal,
    Loop,
    Pipeline,
    Redirect,
    ShellError,
    Simple,
    Test,
    Word,
)

_CLOSERS = {"then", "elif", "else", "fi", "do", "done", "esac", "}"}


def parse_script(text: str, line: int = 1, depth: int = 0) -> Block:
    """The commands of a script. Raises ``ShellError`` with the line for what can't be read."""
    parser = _Parser(Scanner(text, line, depth), depth)
    block = parser.block(())
    if parser.token.operator != "":
        raise ShellError(parser.token.line, f"{_shown(parser.token)} has nothing to close")
    return block


def _shown(token: Token) -> str:
    if token.word is not None:
        return repr(token.word.plain or "a word")
    return repr(token.operator or "redirection")


class _Parser:
    def __init__(self, scanner: Scanner, depth: int) -> None:
        self.scanner = scanner
        self.depth = depth
        self.token = scanner.next()

    def advance(self) -> Token:
        token, self.token = self.token, self.scanner.next()
        return token

    def keyword(self) -> str | None:
        return self.token.word.plain if self.token.word is not None and self.token.word.elements is None else None

    def expect(self, text: str, opened: int) -> None:
        if text not in (self.keyword(), self.token.operator):
            raise ShellError(self.token.line, f"{text!r} is missing for what line {opened} opens")
        self.advance()

    def skip_newlines(self) -> None:
        while self.token.operator == "\n":
            self.advance()

    def block(self, closers: tuple[str, ...]) -> Block:
        """Chains until a closing word or operator that stands at a command's place."""
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise ShellError(self.token.line, f"commands nested deeper than {MAX_NESTING}")
        chains: list[Chain] = []
        while True:
            while self.token.operator in ("\n", ";", "&"):
                self.advance()
            closing = self.keyword() in _CLOSERS or self.token.operator in ("", ")", ";;", ";&", ";;&")
            if closing:
                break
            chains.append(self.chain())
        if self.keyword() in _CLOSERS and self.keyword() not in closers:
            raise ShellError(self.token.line, f"{self.keyword()!r} has nothing to close")
        self.depth -= 1
        return Block(tuple(chains))

    def chain(self) -> Chain:
        first = self.pipeline()
        rest: list[tuple[str, Pipeline]] = []
        while self.token.operator in ("&&", "||"):
            operator = self.advance().operator or ""
            self.skip_newlines()
            rest.append((operator, self.pipeline()))
        return Chain(first, tuple(rest))

    def pipeline(self) -> Pipeline:
        line = self.token.line
        negated = False
        while self.keyword() in ("!", "time"):
            negated ^= self.keyword() == "!"
            self.advance()
        commands = [self.command()]
        while self.token.operator in ("|", "|&"):
            self.advance()
            self.skip_newlines()
            commands.append(self.command())
        return Pipeline(tuple(commands), negated, line)

    def command(self) -> Command:
        line = self.token.line
        if self.token.operator == "(":
            return self.parenthesis(line)
        keyword = self.keyword()
        if keyword == "if":
            return self.if_command(line)
        if keyword in ("while", "until"):
            return self.while_command(line, keyword == "until")
        if keyword in ("for", "select"):
            return self.for_command(line)
        if keyword == "case":
            return self.case_command(line)
        if keyword == "{":
            self.advance()
            body = self.block(("}",))
            self.expect("}", line)
            return Group(body, False, self.redirects(), line)
        if keyword == "[[":
            return self.test_command(line)
        if keyword == "function":
            self.advance()
            name = self.advance().word
            return self.function(name.plain or "" if name else "", line)
        return self.simple(line)

    def parenthesis(self, line: int) -> Command:
        """``((…))`` or a subshell. The scanner stands behind the first parenthesis."""
        scanner = self.scanner
        scanner.position -= 1
        body = scanner.calculation() if scanner.text.startswith("((", scanner.position) else None
        if body is not None:
            self.token = scanner.next()
            return Calculation(body, line)
        scanner.position += 1
        self.advance()
        block = self.block(())
        self.expect(")", line)
        return Group(block, True, self.redirects(), line)

    def if_command(self, line: int) -> If:
        clauses: list[tuple[Block | None, Block]] = []
        while self.keyword() in ("if", "elif"):
            self.advance()
            condition = self.block(("then",))
            self.expect("then", line)
            clauses.append((condition, self.block(("elif", "else", "fi"))))
        if self.keyword() == "else":
            self.advance()
            clauses.append((None, self.block(("fi",))))
        self.expect("fi", line)
        self.redirects()
        return If(tuple(clauses), line)

    def while_command(self, line: int, until: bool) -> Loop:
        self.advance()
        condition = self.block(("do",))
        return Loop(condition, self.loop_body(line), until, line)

    def loop_body(self, line: int) -> Block:
        self.expect("do", line)
        body = self.block(("done",))
        self.expect("done", line)
        self.redirects()
        return body

    def for_command(self, line: int) -> For | Loop:
        header = self.scanner.calculation() if self.token_is_open_header() else None
        if header is not None:
            first, _, rest = header.partition(";")
            condition, _, step = rest.partition(";")
            self.token = self.scanner.next()
            self.separators()
            check = Chain(Pipeline((Calculation(condition or "1", line),), False, line), ())
            return Loop(Block((check,)), self.loop_body(line), False, line, first, step)
        self.advance()
        name = self.advance().word
        if name is None or not name.plain:
            raise ShellError(line, "for without a variable")
        self.skip_newlines()
        words: list[Word] | None = None
        if self.keyword() == "in":
            self.advance()
            words = []
            while self.token.word is not None:
                words.append(self.token.word)
                self.advance()
        self.separators()
        return For(name.plain, None if words is None else tuple(words), self.loop_body(line), line)

    def token_is_open_header(self) -> bool:
        """Whether ``for`` is followed by ``((``: the current token is ``for``, the scanner stands behind it."""
        return self.keyword() == "for" and self.scanner.starts_with("((")

    def separators(self) -> None:
        while self.token.operator in ("\n", ";"):
            self.advance()

    def case_command(self, line: int) -> Case:
        self.advance()
        word = self.advance().word
        self.skip_newlines()
        self.expect("in", line)
        arms: list[tuple[tuple[Word, ...], Block]] = []
        self.skip_newlines()
        while word is not None and self.keyword() != "esac" and self.token.operator != "":
            if self.token.operator == "(":
                self.advance()
            patterns: list[Word] = []
            while self.token.word is not None or self.token.operator == "|":
                token = self.advance()
                patterns += [token.word] if token.word is not None else []
            self.expect(")", line)
            arms.append((tuple(patterns), self.block(("esac",))))
            while self.token.operator in (";;", ";&", ";;&", "\n"):
                self.advance()
        if word is None:
            raise ShellError(line, "case without a word")
        self.expect("esac", line)
        self.redirects()
        return Case(word, tuple(arms), line)

    def test_command(self, line: int) -> Test:
        """``[[ … ]]``: operators between its words are words here."""
        self.advance()
        words: list[Word] = []
        while self.keyword() != "]]":
            token = self.advance()
            if token.operator == "":
                raise ShellError(line, "[[ is never closed")
            if token.word is not None:
                words.append(token.word)
            elif token.redirect is not None:
                words += [Word((Literal(token.redirect.operator),), line), token.redirect.word]
            elif token.operator != "\n":
                words.append(Word((Literal(token.operator or ""),), line))
        self.advance()
        return Test(tuple(words), line)

    def simple(self, line: int) -> Command:
        words: list[Word] = []
        redirects: list[Redirect] = []
        while self.token.word is not None or self.token.redirect is not None:
            token = self.advance()
            if token.redirect is not None:
                redirects.append(token.redirect)
            elif token.word is not None:
                words.append(token.word)
            if len(words) == 1 and self.token.operator == "(" and re.match(r"^[\w.:-]+$", words[0].plain or ""):
                self.advance()
                self.expect(")", line)
                return self.function(words[0].plain or "", line)
        if not words and not redirects:
            raise ShellError(self.token.line, f"{_shown(self.token)} where a command should begin")
        return Simple(tuple(words), tuple(redirects), line)

    def function(self, name: str, line: int) -> Function:
        if self.token.operator == "(":
            self.advance()
            self.expect(")", line)
        self.skip_newlines()
        body = self.command()
        block = body.body if isinstance(body, Group) else Block((Chain(Pipeline((body,), False, line), ()),))
        return Function(name, block, line)

    def redirects(self) -> tuple[Redirect, ...]:
        found: list[Redirect] = []
        while self.token.redirect is not None:
            found.append(self.token.redirect)
            self.advance()
        return tuple(found)
