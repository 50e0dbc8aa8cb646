"""One source file: which environment variables its code reads, declares, forwards or mentions. Parsed, never imported.

Readers that are understood: ``os.environ[…]``, ``.get``, ``in``, ``os.getenv``, functions whose parameter becomes the
name (``get_bool_env_var("X")``), class registries of descriptors (SGLang's ``Envs``), and dicts of lambdas (vLLM's
``environment_variables``). A registry's entry reads nothing by itself: what uses the entry does. Comments, docstrings,
dead code and writes are no readers; a name that occurs otherwise is a *mention*, of which nothing can be said.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.environment.reachability import Platform, module_flags, terminates, truth
from lockstep.environment.source_facts import (
    DEPRECATED,
    VARIABLE,
    descriptor_classes,
    environment_aliases,
    is_deprecation,
    is_variable,
    last_name,
    literal_items,
    lookup_default,
    name_constants,
    name_pattern,
)

_WRITES = ("set", "override", "clear")


@dataclass(frozen=True, slots=True)
class Site:
    """A place where a name is looked at. ``presence``: only whether it is set. ``entry``: the registry entry whose
    value this computes ("" for none). ``dead``: why the code never runs ("" if it may)."""

    name: str
    line: int
    presence: bool = False
    entry: str = ""
    dead: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A call with a name among its arguments: of a wrapper, if ``function`` turns out to be one. ``argument`` is the
    position or the keyword; ``second`` the next argument if it is a name too (what a deprecated one is replaced by)."""

    function: str
    argument: int | str
    site: Site
    second: str = ""


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A function that reads the variable that its parameter names; ``through`` another wrapper ("" itself)."""

    function: str
    position: int
    keyword: str
    presence: bool = False
    through: str = ""
    through_argument: int | str = 0


@dataclass(frozen=True, slots=True)
class Declaration:
    """A registry's entry: its default as source text, other names that it falls back on, and the attribute by which
    code uses it."""

    line: int
    default: str
    aliases: tuple[str, ...]
    attribute: str


@dataclass(slots=True)
class FileScan:
    """What one file says. ``declared``: entries of registries. ``used``: uses of an entry by attribute or import.
    ``forwards``: deprecated name → its replacement ("": it is only warned about).
    ``patterns``: regular expressions of names that are built at run time."""

    reads: list[Site] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    wrappers: list[Wrapper] = field(default_factory=list)
    declared: dict[str, Declaration] = field(default_factory=dict)
    used: list[Site] = field(default_factory=list)
    forwards: dict[str, tuple[int, str]] = field(default_factory=dict)
    patterns: list[tuple[str, int]] = field(default_factory=list)
    mentions: list[Site] = field(default_factory=list)


def scan_source(text: str, platform: Platform | None = None) -> FileScan:
    """Scan a file's text. Raises SyntaxError if it is not Python of this interpreter's version or older."""
    module = ast.parse(text)
    scanner = _Scanner(module, platform)
    scanner.block(module.body, "")
    return scanner.found


class _Scanner:
    """Walks blocks in order, so that it knows what is dead, and expressions within them."""

    def __init__(self, module: ast.Module, platform: Platform | None) -> None:
        self.found = FileScan()
        self._platform: Platform | None = platform
        self._flags = module_flags(module, platform)
        self._functions: list[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda] = []
        self._classes: list[str] = []
        self._entry = ""
        self._loops: dict[str, list[str]] = {}
        self._constants = name_constants(module)
        self._aliases = environment_aliases(module)
        self._descriptors = descriptor_classes(module)
        self._consumed: set[int] = set()

    # --- statements ---------------------------------------------------------------------------------------------------

    def block(self, statements: Sequence[ast.stmt], dead: str) -> None:
        for statement in statements:
            self._statement(statement, dead)
            if not dead and terminates(statement, self._platform, self._flags):
                dead = f"it comes after line {statement.lineno}, which never goes on"

    def _statement(self, node: ast.stmt, dead: str) -> None:
        if isinstance(node, ast.If):
            self._branches(node.test, node.body, node.orelse, dead)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
                self._expression(part, dead)
            self._functions.append(node)
            self.block(node.body, dead)
            self._functions.pop()
        elif isinstance(node, ast.ClassDef):
            self._class(node, dead)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            self._dict(targets, node.value, dead)
        elif isinstance(node, ast.ImportFrom):
            self.found.used += [Site(a.name, node.lineno, dead=dead) for a in node.names if VARIABLE.fullmatch(a.name)]
        elif isinstance(node, ast.Expr):
            self._expression_statement(node.value, dead)
        else:
            self._compound(node, dead)

    def _branches(self, test: ast.expr, body: Sequence[ast.stmt], orelse: Sequence[ast.stmt], dead: str) -> None:
        known = truth(test, self._platform, self._flags)
        self._expression(test, dead)
        self.block(body, dead or (f"it runs only if `{ast.unparse(test)}`" if known is False else ""))
        self.block(orelse, dead or (f"it runs only if not `{ast.unparse(test)}`" if known is True else ""))

    def _compound(self, node: ast.stmt, dead: str) -> None:
        """Any other statement: its expressions, then its blocks."""
        if isinstance(node, ast.For | ast.AsyncFor):
            self._loop(node)
        elif isinstance(node, ast.Delete):
            self._consume(node)
        for name, value in ast.iter_fields(node):
            if name in ("body", "orelse", "finalbody"):
                self.block(value, dead)
            elif name == "handlers":
                for handler in value:
                    self.block(handler.body, dead)
            elif name == "cases":
                for case in value:
                    self.block(case.body, dead)
            else:
                for part in value if isinstance(value, list) else [value]:
                    if isinstance(part, ast.AST):
                        self._expression(part, dead)

    def _expression_statement(self, node: ast.expr, dead: str) -> None:
        if isinstance(node, ast.Constant):
            return  # a docstring, or text that stands there for nothing
        if self._is_environment_call(node) and self._method(node) in ("pop", "setdefault", "update"):
            self._consume(node)  # removed or written; nobody looks at the value here
        self._expression(node, dead)

    def _class(self, node: ast.ClassDef, dead: str) -> None:
        self._classes.append(node.name)
        for statement in node.body:
            value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
            if isinstance(value, ast.Call) and last_name(value.func) in self._descriptors:
                assert isinstance(statement, ast.Assign | ast.AnnAssign)
                target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
                if isinstance(target, ast.Name):
                    self._declare(target.id, value)
        self.block(node.body, dead)
        self._classes.pop()

    def _declare(self, attribute: str, value: ast.Call) -> None:
        """``X = EnvBool(default)`` declares X, ``x = EnvBool("X", default)`` the name that it is told."""
        arguments, name = list(value.args), attribute
        if arguments and isinstance(arguments[0], ast.Constant) and is_variable(arguments[0].value):
            name = str(arguments[0].value)
            self._consumed.add(id(arguments.pop(0)))
        default = ast.unparse(arguments[0]) if arguments else ""
        aliases: list[str] = []
        for keyword in value.keywords:
            if keyword.arg == "default":
                default = ast.unparse(keyword.value)
            elif isinstance(keyword.value, ast.Constant) and is_variable(keyword.value.value):
                aliases.append(str(keyword.value.value))
                self._consumed.add(id(keyword.value))
        self.found.declared[name] = Declaration(value.lineno, default, tuple(aliases), attribute)

    def _dict(self, targets: Sequence[ast.expr], node: ast.Dict, dead: str) -> None:
        """A dict of lambdas is a registry; one that is named or filled for deprecated names forwards them."""
        named = " ".join(ast.unparse(target) for target in targets)
        pairs = [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
        registry = any(
            isinstance(value, ast.Lambda) and any(self._is_environment_call(inner) for inner in ast.walk(value))
            for _, value in pairs
        )
        for key, value in pairs:
            name = key.value if isinstance(key, ast.Constant) and is_variable(key.value) else None
            if isinstance(name, str) and registry:
                self._consumed.add(id(key))
                self.found.declared[name] = Declaration(key.lineno, lookup_default(value), (), name)
                self._entry = name
            elif isinstance(name, str) and (DEPRECATED.search(named) or is_deprecation(value)):
                self._consumed.add(id(key))
                self.found.forwards[name] = (key.lineno, self._replacement(value))
            else:
                self._expression(key, dead)
            self._expression(value, dead)
            self._entry = ""

    def _replacement(self, value: ast.expr) -> str:
        for node in ast.walk(value):
            if isinstance(node, ast.Constant) and is_variable(node.value):
                self._consumed.add(id(node))
                return str(node.value)
        return ""

    def _loop(self, node: ast.For | ast.AsyncFor) -> None:
        """Names that a loop's variable runs over, and a prefix that a loop over the environment asks for."""
        names = [str(part.value) for part in literal_items(node.iter) if isinstance(part, ast.Constant)]
        targets = [part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)]
        if names and targets:
            self._loops[targets[0]] = [name for name in names if is_variable(name)]
            self._consumed.update(id(part) for part in literal_items(node.iter))
        if self._is_environment_items(node.iter) and len(targets) == 2:
            value_is_used = any(isinstance(n, ast.Name) and n.id == targets[1] for s in node.body for n in ast.walk(s))
            for call in (n for s in node.body for n in ast.walk(s)):
                if value_is_used and isinstance(call, ast.Call) and last_name(call.func) == "startswith" and call.args:
                    for prefix in literal_items(call.args[0]) or [call.args[0]]:
                        if isinstance(prefix, ast.Constant) and prefix.value:
                            self.found.patterns.append((re.escape(str(prefix.value)) + ".*", node.lineno))

    # --- expressions --------------------------------------------------------------------------------------------------

    def _expression(self, node: ast.AST, dead: str) -> None:
        if isinstance(node, ast.BoolOp):
            known = truth(node, self._platform, self._flags)
            decided = known is not None and known == isinstance(node.op, ast.Or)
            for value in node.values:
                # An operand that can't change the outcome is as good as unread.
                self._expression(value, dead or (f"`{ast.unparse(node)}` is {known} here" if decided else ""))
            return
        if isinstance(node, ast.IfExp):
            known = truth(node.test, self._platform, self._flags)
            self._expression(node.test, dead)
            test = "" if known is None else ast.unparse(node.test)
            self._expression(node.body, dead or (f"it runs only if `{test}`" if known is False else ""))
            self._expression(node.orelse, dead or (f"it runs only if not `{test}`" if known is True else ""))
            return
        self._look(node, dead)
        if isinstance(node, ast.Lambda):
            self._functions.append(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self._statement(child, dead)
            else:
                self._expression(child, dead)
        if isinstance(node, ast.Lambda):
            self._functions.pop()

    def _look(self, node: ast.AST, dead: str) -> None:
        """What this node itself says."""
        if isinstance(node, ast.Subscript) and self._is_environment(node.value):
            if isinstance(node.ctx, ast.Load):
                self._read(node.slice, dead)
            self._consume(node.slice)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.In | ast.NotIn):
            if self._is_environment(node.comparators[0]):
                self._read(node.left, dead, presence=True)
        elif isinstance(node, ast.Call):
            self._call(node, dead)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if id(node) not in self._consumed:
                self.found.used.append(Site(node.attr, node.lineno, entry=self._entry, dead=dead))
        elif isinstance(node, ast.Constant) and is_variable(node.value) and id(node) not in self._consumed:
            self.found.mentions.append(Site(str(node.value), node.lineno, entry=self._entry, dead=dead))

    def _call(self, node: ast.Call, dead: str) -> None:
        function = last_name(node.func)
        if self._is_environment_call(node):
            if function in ("setdefault", "update", "putenv"):
                self._consume(node)
            elif node.args and id(node.args[0]) not in self._consumed:
                self._read(node.args[0], dead)
            return
        if function in _WRITES and isinstance(node.func, ast.Attribute):
            self._consumed.add(id(node.func.value))  # envs.X.set(…): written, not read
        arguments: list[tuple[int | str, ast.expr]] = [
            *enumerate(node.args),
            *((keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg),
        ]
        for argument, value in arguments:
            for name in () if id(value) in self._consumed else self._names(value):
                second = (
                    node.args[argument + 1] if isinstance(argument, int) and argument + 1 < len(node.args) else None
                )
                after = str(second.value) if isinstance(second, ast.Constant) and is_variable(second.value) else ""
                site = Site(name, node.lineno, entry=self._entry, dead=dead)
                self.found.calls.append(Call(function, argument, site, after))
                self._consumed.add(id(value))
            if isinstance(value, ast.Name) and "env" in function.lower() and (at := self._parameter(value.id)):
                self.found.wrappers.append(Wrapper(*at, through=function, through_argument=argument))

    def _read(self, key: ast.expr, dead: str, *, presence: bool = False) -> None:
        names = self._names(key)
        self.found.reads += [Site(name, key.lineno, presence, self._entry, dead) for name in names]
        self._consume(key)
        if names or isinstance(key, ast.Constant):
            return
        if isinstance(key, ast.Name) and (at := self._parameter(key.id)):
            self.found.wrappers.append(Wrapper(*at, presence=presence))
        elif (pattern := name_pattern(key)) and not presence and not dead:
            self.found.patterns.append((pattern, key.lineno))

    def _names(self, node: ast.expr) -> list[str]:
        """The variables that an expression may name, as far as this file tells."""
        if isinstance(node, ast.Constant):
            return [str(node.value)] if is_variable(node.value) else []
        if isinstance(node, ast.Name):
            return self._loops.get(node.id) or self._constants.get(node.id, [])
        if isinstance(node, ast.IfExp):
            return [*self._names(node.body), *self._names(node.orelse)]
        return []

    def _parameter(self, name: str) -> tuple[str, int, str] | None:
        """(function, position, keyword) of the named function around this place that has such a parameter."""
        for index in range(len(self._functions) - 1, -1, -1):
            function = self._functions[index]
            parameters = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
            every = [*parameters, *(a.arg for a in function.args.kwonlyargs)]
            if name in every and isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                position = parameters.index(name) if name in parameters else -1
                bound = bool(parameters) and parameters[0] in ("self", "cls") and bool(self._classes)
                return function.name, position - bound, name
        return None

    def _consume(self, node: ast.AST) -> None:
        """Constants below this node are accounted for; they are no mentions."""
        self._consumed.update(id(part) for part in ast.walk(node) if isinstance(part, ast.Constant))

    # --- the environment ----------------------------------------------------------------------------------------------

    def _is_environment(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr == "environ"
        return isinstance(node, ast.Name) and (node.id == "environ" or node.id in self._aliases)

    def _is_environment_call(self, node: ast.AST) -> bool:
        """``os.getenv(…)``, ``os.putenv(…)``, or a method of the environment that takes a name."""
        if not isinstance(node, ast.Call):
            return False
        if last_name(node.func) in ("getenv", "putenv"):
            return True
        methods = ("get", "pop", "setdefault", "update", "__getitem__")
        return isinstance(node.func, ast.Attribute) and (
            node.func.attr in methods and self._is_environment(node.func.value)
        )

    @staticmethod
    def _method(node: ast.expr) -> str:
        return last_name(node.func) if isinstance(node, ast.Call) else ""

    def _is_environment_items(self, node: ast.expr) -> bool:
        return any(
            isinstance(part, ast.Call) and last_name(part.func) == "items" and self._is_environment(part.func.value)
            for part in ast.walk(node)
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute)
        )
