"""Read lane marks from the source of test files. Nothing is imported, so a test whose engine is absent can be planned.

Arguments must be literals; what is computed is an error with its place. A mark may stand on a test, on a class, or in
the file's ``pytestmark``; the nearest one holds, as with pytest.
"""

from __future__ import annotations

import ast
import fnmatch
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lockstep.lanes.declare import Declaration, FoundTest
from lockstep.lanes.fields import build_declaration

FILE_PATTERNS = ("test_*.py", "*_test.py")
"""pytest's default ``python_files``; classes begin with ``Test`` and functions with ``test``, also its defaults."""

LEFT_OUT = ("*.egg", ".*", "_darcs", "build", "CVS", "dist", "node_modules", "venv", "{arch}")
"""pytest's default ``norecursedirs``; virtual environments are left out too."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files_of_tests(root: Path, test_paths: Sequence[str]) -> list[Path]:
    """All files under ``test_paths`` that pytest would collect, sorted."""
    found: set[Path] = set()
    for name in test_paths:
        folder = root / name
        found |= {path for path in python_files(folder) if is_test_file(path.name)}
    return sorted(found)


def python_files(folder: Path) -> list[Path]:
    """Python files below a folder (or the file itself), sorted, without the folders that pytest leaves out."""
    if folder.is_file():
        return [folder]
    found: list[Path] = []
    for above, names, files in os.walk(folder):
        names[:] = [name for name in names if not _is_left_out(Path(above, name))]
        found += [Path(above, name) for name in files if name.endswith(".py")]
    return sorted(found)


def _is_left_out(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").exists() or any(fnmatch.fnmatchcase(folder.name, one) for one in LEFT_OUT)


def is_test_file(name: str) -> bool:
    """Whether pytest collects a file of this name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in FILE_PATTERNS)


def read_tests(root: Path, test_paths: Sequence[str]) -> tuple[list[FoundTest], list[str]]:
    """All tests under ``test_paths`` (relative to ``root``), and everything wrong with their marks."""
    tests: list[FoundTest] = []
    problems: list[str] = [f"test path {name} does not exist" for name in test_paths if not (root / name).exists()]
    for path in files_of_tests(root, test_paths):
        relative = path.relative_to(root).as_posix()
        found, wrong = read_source(path.read_bytes(), relative)
        tests += found
        problems += wrong
    return tests, problems


def read_source(text: str | bytes, path: str) -> tuple[list[FoundTest], list[str]]:
    """Tests of one file's text (bytes: in the encoding that it declares), and what is wrong with its marks."""
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        return [], [f"{path}:{error.lineno or 1}: not Python: {error.msg}"]
    except ValueError as error:  # a null byte
        return [], [f"{path}:1: not Python: {error}"]
    problems: list[str] = []
    outer = [value for value in _pytestmark(module) if _is_lane(value)]
    inherited = _declaration(outer, path, problems)
    tests = _without_twins(_walk(module.body, path, "", inherited, None, problems), problems)
    return tests, problems


def _without_twins(tests: Iterable[FoundTest], problems: list[str]) -> list[FoundTest]:
    """One test for each name: branches of an ``if`` may both define it, but then neither may say where it runs."""
    kept: dict[str, FoundTest] = {}
    for test in tests:
        first = kept.setdefault(test.name, test)
        if first is not test and first.declaration != test.declaration:
            problems.append(
                f"{test.where}: {test.name} has another lane mark than in line {first.line}; write one test, what "
                "differs by hardware is data of its mark"
            )
    return list(kept.values())


def _pytestmark(module: ast.Module) -> Iterator[ast.expr]:
    for node in module.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in targets):
            assert isinstance(node, ast.Assign)
            yield from node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]


def _is_lane(node: ast.expr) -> bool:
    """``pytest.mark.lane`` or ``mark.lane``, called or not."""
    target = node.func if isinstance(node, ast.Call) else node
    if not (isinstance(target, ast.Attribute) and target.attr == "lane"):
        return False
    mark = target.value
    return (isinstance(mark, ast.Attribute) and mark.attr == "mark") or (
        isinstance(mark, ast.Name) and mark.id == "mark"
    )


def _declaration(marks: list[ast.expr], path: str, problems: list[str]) -> tuple[Declaration, int] | None:
    """The declaration of the one lane mark among decorators, with its line."""
    if not marks:
        return None
    if len(marks) > 1:
        lines = ", ".join(str(mark.lineno) for mark in marks)
        problems.append(f"{path}:{marks[0].lineno}: more than one lane mark (lines {lines}); a test has one lane")
    mark = marks[0]
    if not isinstance(mark, ast.Call):
        problems.append(f'{path}:{mark.lineno}: a bare mark; name the lane: @pytest.mark.lane("stage-…", …)')
        return None
    declaration, wrong = build_declaration(mark)
    problems += [f"{path}:{line}: {text}" for line, text in wrong]
    return None if declaration is None else (declaration, mark.lineno)


def _walk(
    body: list[ast.stmt],
    path: str,
    prefix: str,
    inherited: tuple[Declaration, int] | None,
    hidden: str | None,
    problems: list[str],
) -> Iterator[FoundTest]:
    """Tests among statements. ``hidden``: why pytest collects nothing in this class, else None."""
    seen: dict[str, int] = {}
    for node in body:
        for branch in _branches(node):
            yield from _walk(branch, path, prefix, inherited, hidden, problems)
        if not isinstance(node, Function | ast.ClassDef):
            continue
        own = _declaration([mark for mark in node.decorator_list if _is_lane(mark)], path, problems)
        effective = own or inherited
        if isinstance(node, ast.ClassDef):
            why = hidden or _class_is_hidden(node)
            yield from _walk(
                node.body, path, f"{prefix}{node.name}::", effective if why is None else own, why, problems
            )
            continue
        is_test = node.name.startswith("test")
        if (hidden and effective is None) or (not is_test and own is None):
            continue
        if node.name in seen:
            problems.append(
                f"{path}:{node.lineno}: {node.name} is defined again and hides the one in line {seen[node.name]}, "
                "which never runs; rename one of them"
            )
        seen[node.name] = node.lineno
        why = hidden if is_test else f"its name does not begin with test: {node.name}"
        yield FoundTest(
            path=path,
            name=f"{prefix}{node.name}",
            line=own[1] if own else node.lineno,
            declaration=effective[0] if effective else None,
            never_collected=why or _no_parameters(node),
        )


def _branches(node: ast.stmt) -> list[list[ast.stmt]]:
    """Statement lists within a statement of which one may run and another not."""
    if isinstance(node, ast.If):
        return [node.body, node.orelse]
    if isinstance(node, ast.Try):
        return [[*node.body, *node.orelse, *node.finalbody], *(handler.body for handler in node.handlers)]
    return [node.body] if isinstance(node, ast.With) else []


def _class_is_hidden(node: ast.ClassDef) -> str | None:
    if not node.name.startswith("Test") and not any("TestCase" in ast.unparse(base) for base in node.bases):
        return f"its class does not begin with Test: {node.name}"
    if any(isinstance(member, Function) and member.name == "__init__" for member in node.body):
        return f"its class {node.name} has an __init__, which pytest refuses"
    return None


def _no_parameters(node: Function) -> str | None:
    for mark in node.decorator_list:
        if not (isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("mark.parametrize")):
            continue
        values = mark.args[1] if len(mark.args) > 1 else None
        if isinstance(values, ast.List | ast.Tuple) and not values.elts:
            return "it is parametrized over an empty list"
    return None
