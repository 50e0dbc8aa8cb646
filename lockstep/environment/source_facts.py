"""What a whole source file tells before it is walked: constants that hold names, aliases of the environment, descriptor
classes; and how an expression builds a name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{2,}")
"""What a name must look like to be taken for an environment variable's."""

DEPRECATED = re.compile(r"deprecat|removed|obsolete", re.IGNORECASE)
"""How code calls what it only warns about."""


def is_variable(value: object) -> bool:
    """Whether a constant may be a variable's name."""
    return isinstance(value, str) and VARIABLE.fullmatch(value) is not None


def last_name(node: ast.AST) -> str:
    """The last identifier of a dotted name, "" for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def literal_items(node: ast.expr) -> list[ast.expr]:
    """The members of a literal list, tuple, set or dict (its keys)."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return list(node.elts)
    return [key for key in node.keys if key is not None] if isinstance(node, ast.Dict) else []


def _assignments(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def name_constants(module: ast.Module) -> dict[str, list[str]]:
    """Names of the file that hold a variable's name, or several."""
    found: dict[str, list[str]] = {}
    for name, value in _assignments(module):
        if isinstance(value, ast.Constant) and is_variable(value.value):
            found.setdefault(name, []).append(str(value.value))
    return found


def environment_aliases(module: ast.Module) -> set[str]:
    """Names that hold the environment or a copy: ``env = os.environ.copy()``, ``os.environ if e is None else e``."""
    found: set[str] = set()
    for name, value in _assignments(module):
        whole = [value, *((value.body, value.orelse) if isinstance(value, ast.IfExp) else ())]
        if isinstance(value, ast.Call):
            whole += value.args
            if isinstance(value.func, ast.Attribute) and value.func.attr == "copy":
                whole.append(value.func.value)
        if any(isinstance(part, ast.Attribute) and part.attr == "environ" for part in whole):
            found.add(name)
    return found


def descriptor_classes(module: ast.Module) -> set[str]:
    """Classes whose objects read the variable that they are named for, and those derived from them in this file."""
    classes = {node.name: node for node in ast.walk(module) if isinstance(node, ast.ClassDef)}
    found = {name for name, node in classes.items() if any(_reads_own_name(part) for part in node.body)}
    while more := {
        name for name, node in classes.items() if name not in found and found & {last_name(base) for base in node.bases}
    }:
        found |= more
    return found


def _reads_own_name(method: ast.stmt) -> bool:
    """Whether a method learns the name that its object is assigned to, or looks ``self.…`` up in the environment."""
    if not isinstance(method, ast.FunctionDef):
        return False
    lookups = (node for node in ast.walk(method) if isinstance(node, ast.Call) and node.args)
    return method.name == "__set_name__" or any(
        last_name(node.func) == "getenv" or (last_name(node.func) == "get" and "environ" in ast.unparse(node.func))
        for node in lookups
        if isinstance(node.args[0], ast.Attribute) and last_name(node.args[0].value) == "self"
    )


def lookup_default(value: ast.expr) -> str:
    """The second argument of the first lookup in a registry's value, as source text."""
    for node in ast.walk(value):
        if isinstance(node, ast.Call) and len(node.args) > 1 and last_name(node.func) in ("getenv", "get"):
            return ast.unparse(node.args[1])
    return ""


def is_deprecation(value: ast.expr) -> bool:
    """Whether a value is made by something named for deprecation."""
    return isinstance(value, ast.Call) and DEPRECATED.search(last_name(value.func)) is not None


def name_pattern(node: ast.expr) -> str:
    """A regular expression of the names that an expression can build; "" if nothing of them is fixed."""
    parts = "".join(_parts(node))
    return parts if len(re.sub(r"\.\*|\\", "", parts)) >= 2 else ""


def _parts(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant):
        yield re.escape(str(node.value))
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield from _parts(value)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _parts(node.left)
        yield from _parts(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant):
        yield re.sub(r"%[a-z]", ".*", re.escape(str(node.left.value)))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        inner = node.func.value
        yield re.sub(r"\\\{.*?\\\}", ".*", re.escape(str(inner.value))) if isinstance(inner, ast.Constant) else ".*"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield from _parts(node.func.value)  # (…).upper(), .strip()
    else:
        yield ".*"
