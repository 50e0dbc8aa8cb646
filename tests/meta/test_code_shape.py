"""The shape of the package's code: documented, short functions, short files, no forgotten work. Functions are short in
benchmarks, tests and tools too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lockstep"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 400

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE.parent))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def public_definitions(module: ast.Module) -> Iterator[Definition]:
    """Public functions and classes of a module's top level."""
    for node in module.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node


def lines_of(node: ast.AST) -> int:
    """Lines of a definition, decorators and docstring left out."""
    assert isinstance(node, Definition)
    documented = ast.get_docstring(node) is not None
    docstring = node.body[0]
    first = node.lineno
    length = (node.end_lineno or first) - first + 1
    return length - ((docstring.end_lineno or 0) - docstring.lineno + 1 if documented else 0)


def test_there_is_code_to_look_at() -> None:
    assert len(FILES) > 20


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_file_explains_itself(path: Path) -> None:
    module = parse(path)
    assert ast.get_docstring(module), f"{name_of(path)} has no module docstring"
    bare = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for node in public_definitions(module)
        if not ast.get_docstring(node)
    ]
    assert not bare, f"public names without a docstring: {bare}"


def long_functions(path: Path) -> list[str]:
    return [
        f"{name_of(path)}:{node.lineno} {node.name} has {lines_of(node)} lines"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of(node) > MAX_FUNCTION_LINES
    ]


@pytest.mark.parametrize("folder", ["benchmarks", "tests", "tools"])
def test_functions_outside_the_package_are_short(folder: str) -> None:
    paths = sorted((PACKAGE.parent / folder).rglob("*.py"))
    assert paths
    assert not [text for path in paths for text in long_functions(path)]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_functions_and_files_are_short(path: Path) -> None:
    long = long_functions(path)
    assert not long, f"functions above {MAX_FUNCTION_LINES} lines: {long}"
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_FILE_LINES, f"{name_of(path)} has {num_lines} lines, above {MAX_FILE_LINES}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_error_is_swallowed_and_nothing_is_left_undone(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    faults: list[str] = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ExceptHandler):
            catches_all = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            if catches_all and all(isinstance(statement, ast.Pass | ast.Continue) for statement in node.body):
                faults.append(f"{name_of(path)}:{node.lineno} swallows every error")
        if isinstance(node, ast.Raise) and "NotImplementedError" in ast.dump(node):
            faults.append(f"{name_of(path)}:{node.lineno} raises NotImplementedError")
    unfinished = re.compile(r"\b(TODO|FIXME|XXX)\b")
    faults += [
        f"{name_of(path)}:{n} is unfinished: {line}"
        for n, line in enumerate(text.splitlines(), 1)
        if unfinished.search(line)
    ]
    assert not faults
