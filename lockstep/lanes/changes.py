"""From changed files to the test files that they reach: through imports, and through the catalogue's ``[[changes]]``.

Package modules are followed with grimp, which sees imports within functions too. Test files are read here, since test
folders need not be packages. What no rule explains is not guessed at: an unknown file selects every test.
"""

from __future__ import annotations

import ast
import fnmatch
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.lanes.catalogue import Catalogue
from lockstep.lanes.errors import LanesError
from lockstep.lanes.read import files_of_tests, is_test_file, python_files


def git(root: Path, *arguments: str) -> str:
    """Standard output of a git command. Raises ``LanesError`` with git's own words."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise LanesError(f"git can't be run: {error}") from error
    if done.returncode:
        raise LanesError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def changed_files(root: Path, since: str) -> list[str]:
    """Files that differ from where this branch left ``since``, with what is not committed and not ignored.

    Relative to ``root``, which may lie below the top of its git repository: what lies beside it begins with ``../``.

    Raises ``LanesError`` if ``since`` is not known here, as in a shallow clone.
    """
    try:
        base = git(root, "merge-base", "--", since, "HEAD").strip()
    except LanesError as error:
        raise LanesError(
            f"--changed-since {since}: no common commit is known here ({error}); "
            "fetch the whole history (actions/checkout: fetch-depth: 0)"
        ) from None
    below_top = git(root, "rev-parse", "--show-prefix").removesuffix("\n") or "."
    listed = git(root, "diff", "--name-only", "--no-renames", "-z", base, "--")  # from the top
    untracked = git(root, "ls-files", "--others", "--exclude-standard", "-z")  # from root
    names = {os.path.relpath(name, below_top) for name in listed.split("\0") if name}
    return sorted(names | {name for name in untracked.split("\0") if name})


def reached_tests(root: Path, catalogue: Catalogue, changed: Sequence[str]) -> dict[str, str]:
    """Reason by test file, for the test files that the changed files reach; the first reason found for each."""
    graph = ImportGraph.build(root, catalogue)
    reasons: dict[str, str] = {}
    for name in changed:
        for test, reason in _reached_from(name, graph, catalogue).items():
            reasons.setdefault(test, reason)
    return reasons


def _reached_from(name: str, graph: ImportGraph, catalogue: Catalogue) -> dict[str, str]:
    rules = [one for one in catalogue.changes if any(_fits(name, pattern) for pattern in one.files)]
    reasons = {
        test: f"{name} changed, which [[changes]] of the catalogue names"
        for test in graph.tests
        if any(_fits(test, pattern) for one in rules for pattern in one.tests)
    }
    by_import = graph.reached(name)
    if not by_import and not rules and not _only_a_test(name, catalogue):
        return dict.fromkeys(graph.tests, f"{name} changed, and nothing says who reads it")
    return {**(by_import or {}), **reasons}


def _only_a_test(name: str, catalogue: Catalogue) -> bool:
    """Whether a file is, or was before it was deleted, a test file and no part of a package."""
    return is_test_file(PurePosixPath(name).name) and any(_fits(name, path) for path in catalogue.test_paths)


def _fits(name: str, pattern: str) -> bool:
    """``*`` crosses folders; a pattern without one also means everything below a folder of this name."""
    return fnmatch.fnmatchcase(name, pattern) or name.startswith(pattern.rstrip("/") + "/")


@dataclass(frozen=True)
class ImportGraph:
    """Who imports whom, by file. ``importers[file]``: files that import it. ``tests``: test files."""

    importers: Mapping[str, frozenset[str]]
    tests: frozenset[str]
    packages: tuple[str, ...]

    @classmethod
    def build(cls, root: Path, catalogue: Catalogue) -> ImportGraph:
        """Read the packages through grimp and the Python files below the test paths by their source."""
        edges = _package_edges(root, catalogue.packages)
        sources = sorted({path for name in catalogue.test_paths for path in python_files(root / name)})
        sources += [path for path in _conftests_above(root, catalogue.test_paths) if path not in sources]
        for path in sources:
            name = path.relative_to(root).as_posix()
            for imported in _imports(path, root):
                edges.setdefault(imported, set()).add(name)
        tests = {path.relative_to(root).as_posix() for path in files_of_tests(root, catalogue.test_paths)}
        for path in sources:  # pytest imports each conftest.py above a test
            if path.name == "conftest.py":
                above = PurePosixPath(path.relative_to(root).as_posix())
                edges.setdefault(str(above), set()).update(t for t in tests if above.parent in PurePosixPath(t).parents)
        frozen = {name: frozenset(importers) for name, importers in edges.items()}
        return cls(frozen, frozenset(tests), tuple(name.replace(".", "/") for name in catalogue.packages))

    def reached(self, name: str) -> dict[str, str] | None:
        """Reason by test file that a change of one file reaches; None if no import can tell.

        A file of a package that is no module (data, compiled sources) counts as its whole folder.
        """
        in_package = any(name.startswith(package + "/") for package in self.packages)
        if not name.endswith(".py"):
            if not in_package:
                return None
            folder = str(PurePosixPath(name).parent)
            starts = [one for one in self.importers if str(PurePosixPath(one).parent) == folder]
            return self._walk(name, starts) if starts else None
        if name not in self.importers and name not in self.tests:
            return None  # not in the tree, or outside of it: who imports it is not known
        return self._walk(name, [name])

    def _walk(self, changed: str, starts: Iterable[str]) -> dict[str, str]:
        came_from: dict[str, str | None] = dict.fromkeys(starts)
        queue = deque(came_from)
        while queue:
            current = queue.popleft()
            for importer in sorted(self.importers.get(current, ())):
                if importer not in came_from:
                    came_from[importer] = current
                    queue.append(importer)
        return {test: _chain(test, came_from, changed) for test in sorted(self.tests & came_from.keys())}


def _chain(test: str, came_from: Mapping[str, str | None], changed: str) -> str:
    steps, current = [], came_from[test]
    while current is not None:
        steps.append(current)
        current = came_from[current]
    if not steps:
        return "it changed" if test == changed else f"{changed} changed"
    shown = steps if len(steps) <= 3 else [steps[0], "…", steps[-1]]
    return f"{changed} changed, imported through {' ← '.join(reversed(shown))}"


def _package_edges(root: Path, packages: Sequence[str]) -> dict[str, set[str]]:
    """Importers by file of the packages' modules. An import runs every ``__init__`` above it: these are edges too."""
    if not packages:
        return {}
    graph = build_grimp(root, packages)
    files = {module: _module_file(root, module) for module in graph.modules}
    edges: dict[str, set[str]] = {name: set() for name in files.values() if name}
    for module, name in files.items():
        if name is None:
            continue
        for importer in graph.find_modules_that_directly_import(module):
            if files.get(importer):
                edges[name].add(files[importer] or "")
        parent = files.get(module.rpartition(".")[0])
        if parent:
            edges[parent].add(name)
    return edges


def build_grimp(root: Path, packages: Sequence[str]) -> Any:
    """grimp's graph of the packages below ``root``. Raises ``LanesError`` if grimp or a package is absent."""
    try:
        import grimp
    except ImportError:
        raise LanesError("imports are followed with grimp, which is not installed: pip install grimp") from None
    sys.path.insert(0, str(root))
    try:
        return grimp.build_graph(*packages, cache_dir=None, exclude_type_checking_imports=True)
    except Exception as error:  # grimp has no common base for what it says of a package
        raise LanesError(f"packages of the catalogue: {error}") from error
    finally:
        sys.path.remove(str(root))


def _module_file(root: Path, module: str) -> str | None:
    base = module.replace(".", "/")
    for name in (f"{base}/__init__.py", f"{base}.py"):
        if (root / name).exists():
            return name
    return None


def _conftests_above(root: Path, test_paths: Sequence[str]) -> list[Path]:
    """``conftest.py`` of the root and of each folder between it and the test paths; pytest imports these too."""
    folders = {root, *(above for name in test_paths for above in (root / name).parents if root in above.parents)}
    return sorted(path for folder in folders if (path := folder / "conftest.py").is_file())


def _imports(path: Path, root: Path) -> set[str]:
    """Files of the project that a test-side file imports, ``__init__`` files on the way included."""
    try:
        module = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return set()  # read_tests reports it
    names: set[str] = set()
    here = path.parent.relative_to(root).parts
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(here[: len(here) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (above, node.module or "") if part)
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "pytest_plugins" for target in node.targets
        ):
            constants = [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
            names |= {value for value in constants if isinstance(value, str)}
    found: set[str] = set()
    for name in names:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            prefix = ".".join(parts[:length])
            found |= {file for folder in (root, path.parent) if (file := _below(root, folder, prefix))}
    return found - {path.relative_to(root).as_posix()}


def _below(root: Path, folder: Path, module: str) -> str | None:
    file = _module_file(folder, module)
    return None if file is None else (folder / file).relative_to(root).as_posix()
