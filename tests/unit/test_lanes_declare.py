"""Marks are read from the source, as literals, and everything wrong with them is said with its place."""

from __future__ import annotations

import ast
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from lockstep.lanes import Disabled
from lockstep.lanes.declare import FoundTest
from lockstep.lanes.read import read_source, read_tests
from lockstep.lanes.select import all_cases
from tests.unit.lanes_planted import CATALOGUE, HEAD, mark, plant

FULL = """
@pytest.mark.lane(
    "four",
    hardware={"cuda": "h200", "rocm": ["mi300x", "mi350"]},
    minutes=15,
    labels=["megatron", "replay"],
    owner="refit",
    disabled={"mi350": Disabled(reason="hangs", issue="https://example.org/1", expires="2027-01-31")},
    recipe="tiny",
    overlay={"rocm": "mi350"},
    layout={"*": {"tensor": 2}, "rocm": {"expert": 4}},
    extra_args={"*": ["--a"], "rocm": ["--b"], "mi350": ["--c"]},
    extra_env={"rocm": {"X": "1", "Y": "1"}, "mi350": {"X": "2"}},
    gates=["agreement"],
    run={"num_steps": 20, "step_s": 30.0},
    retries=1,
)
@pytest.mark.parametrize("n", [1, 2])
async def test_a(n): raise SystemExit("importing or running this is a mistake")
"""


def one_test(text: str) -> FoundTest:
    tests, problems = read_source(HEAD + text, "tests/test_a.py")
    assert problems == []
    (test,) = tests
    return test


def problems_of(text: str) -> list[str]:
    return read_source(HEAD + text, "tests/test_a.py")[1]


def test_a_full_mark_is_read_without_importing_the_file(tmp_path: Path) -> None:
    root = plant(tmp_path, {"tests/test_a.py": "raise SystemExit('imported')\n" + HEAD + FULL})
    before = set(sys.modules)
    tests, problems = read_tests(root, ["tests"])
    assert problems == []
    assert "test_a" not in set(sys.modules) - before
    declaration = tests[0].declaration
    assert declaration is not None
    assert declaration.hardware == {"cuda": ("h200",), "rocm": ("mi300x", "mi350")}
    assert declaration.disabled == {"mi350": Disabled("hangs", "https://example.org/1", "2027-01-31")}
    assert tests[0].where == "tests/test_a.py:6"


def test_a_case_has_the_data_of_its_hardware(tmp_path: Path) -> None:
    from lockstep.lanes.catalogue import load_catalogue

    catalogue = load_catalogue(plant(tmp_path, {}, CATALOGUE))
    cases = {case.hardware: case for case in all_cases([one_test(FULL)], catalogue)}
    assert list(cases) == ["h200", "mi300x", "mi350"]
    assert [cases[name].extra_args for name in cases] == [("--a",), ("--a", "--b"), ("--a", "--b", "--c")]
    assert [cases[name].extra_env for name in cases] == [{}, {"X": "1", "Y": "1"}, {"X": "2", "Y": "1"}]
    assert [cases[name].layout for name in cases] == [{"tensor": 2}, *[{"tensor": 2, "expert": 4}] * 2]
    assert [cases[name].overlay for name in cases] == [None, "mi350", "mi350"]
    assert [cases[name].disabled is None for name in cases] == [True, True, False]
    assert {case.num_gpus for case in cases.values()} == {4}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("labels=LABELS", "labels is not literal: LABELS"),
        ("labels=[f'{os.name}']", "labels is not literal"),
        ("labels=['a'] + ['b']", "labels is not literal"),
        ("disabled={'cuda': Disabled('a', 'b', str(1))}", "disabled is not literal: str(1)"),
        ("disabled={'cuda': Disabled(reason='a', issue='b')}", "Disabled needs reason, issue and expires"),
        ("disabled={'cuda': Disabled('a', '', '2027-01-01')}", "issue: expected a text that is not empty"),
        ("disabled={'cuda': Disabled('a', 'b', 'soon')}", "expires must be a date such as 2027-01-31, got 'soon'"),
        ("disabled={'cuda': 'flaky'}", "expected Disabled(reason=…, issue=…, expires=…), got 'flaky'"),
        ("**MORE", "** hides what is declared"),
        ("labels='replay'", "labels: expected a list of texts, got 'replay'"),
        ("extra_env={'cuda': {'X': 1}}", "extra_env: expected texts by variable"),
        ("minuts=3", "unknown argument minuts; known: lane, hardware, minutes"),
        ("run={'steps': 3}", "run: expected a table of num_steps, step_s, checked_at_step"),
        ("retries=-1", "retries: expected a whole number from 0, got -1"),
    ],
)
def test_what_is_not_a_fitting_literal_is_refused_with_its_place(more: str, says: str) -> None:
    (problem,) = problems_of(mark(more=more) + "def test_a(): pass\n")
    assert problem.startswith("tests/test_a.py:4: ")
    assert says in problem


def test_all_problems_of_a_file_are_told_at_once() -> None:
    text = '@pytest.mark.lane("one", minutes=True)\ndef test_a(): pass\n@pytest.mark.lane\ndef test_b(): pass\n'
    found = problems_of(text)
    for says in ("hardware is missing", "owner is missing", "minutes: expected a number", "a bare mark"):
        assert sum(says in problem for problem in found) == 1
    assert len(found) == 4


def test_an_estimate_is_not_assumed() -> None:
    """Fault H3: a test without an estimate counted as 300 seconds, so shards even on paper ran twice as long."""
    (problem,) = problems_of('@pytest.mark.lane("one", hardware={"cuda": "h200"}, owner="me")\ndef test_a(): pass\n')
    assert "minutes is missing: an estimate" in problem
    assert "nothing is assumed" in problem


def test_the_nearest_mark_holds() -> None:
    text = f"pytestmark = [{mark('one').strip()[1:]}]\n" + "def test_file(): pass\n"
    text += mark("four") + "class TestA:\n    def test_class(self): pass\n"
    text += "    " + mark("night") + "    def test_own(self): pass\n"
    tests, problems = read_source(HEAD + text, "tests/test_a.py")
    assert problems == []
    lanes = {test.name: test.declaration.lane for test in tests if test.declaration}
    assert lanes == {"test_file": "one", "TestA::test_class": "four", "TestA::test_own": "night"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (mark() + "def check_a(): pass\n", "its name does not begin with test: check_a"),
        ("class Cases:\n    " + mark() + "    def test_a(self): pass\n", "its class does not begin with Test: Cases"),
        (
            "class TestA:\n    def __init__(self): pass\n    " + mark() + "    def test_a(self): pass\n",
            "has an __init__",
        ),
        (mark() + "@pytest.mark.parametrize('n', [])\ndef test_a(n): pass\n", "parametrized over an empty list"),
    ],
)
def test_what_pytest_will_not_collect_is_seen_in_the_source(text: str, why: str) -> None:
    found = one_test(text)
    assert found.declaration is not None
    assert found.never_collected is not None
    assert why in found.never_collected


def test_a_test_that_hides_another_is_told() -> None:
    (problem,) = problems_of("def test_a(): pass\ndef test_a(): pass\n")
    assert problem.startswith("tests/test_a.py:5: test_a is defined again and hides the one in line 4")
    assert problems_of("if os.name == 'nt':\n    def test_a(): pass\nelse:\n    def test_b(): pass\n") == []


def test_a_file_that_is_not_python_is_told() -> None:
    assert problems_of("def test_a(:\n")[0].startswith("tests/test_a.py:4: not Python")


def test_expiry_is_the_day_after_the_date() -> None:
    off = Disabled("a", "b", "2027-01-31")
    assert not off.expired(date(2027, 1, 31))
    assert off.expired(date(2027, 2, 1))


def test_the_package_imports_nothing_else_of_lockstep() -> None:
    package = Path(__file__).parents[2] / "lockstep/lanes"
    outside: set[str] = set()
    for path in package.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            outside |= {name for name in names if name.startswith("lockstep") and not name.startswith("lockstep.lanes")}
    assert outside == set()


def test_reading_a_project_needs_no_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None\nimport lockstep.lanes.commands, lockstep.cli_lanes\n"
    code += "print(sorted(name for name in ('grimp', 'torch', 'pydantic') if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_branches_may_define_a_test_each_but_not_declare_it_differently() -> None:
    body = "import os\nif os.name:\n    {0}def test_a(): pass\nelse:\n    {1}def test_a(): pass\n"
    tests, problems = read_source(body.format("", ""), "tests/test_a.py")
    assert ([test.name for test in tests], problems) == (["test_a"], [])
    one, two = (mark("one", hardware).strip() + "\n    " for hardware in ('{"cuda": "h200"}', '{"rocm": "mi350"}'))
    assert read_source(body.format(one, one), "tests/test_a.py")[1] == []
    (problem,) = read_source(body.format(one, two), "tests/test_a.py")[1]
    assert problem.startswith("tests/test_a.py:6: test_a has another lane mark than in line 3; write one test")


def test_tests_in_a_handler_are_seen() -> None:
    text = "try:\n    import x\nexcept ImportError:\n    def test_without(): pass\nelse:\n    def test_with(): pass\n"
    assert {test.name for test in read_source(text, "tests/test_a.py")[0]} == {"test_with", "test_without"}


def test_a_file_is_read_in_the_encoding_that_it_declares(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_old.py").write_bytes(b"# -*- coding: latin-1 -*-\n# caf\xe9\ndef test_old(): pass\n")
    (folder / "test_wrong.py").write_bytes(b"X = 'caf\xe9'\ndef test_wrong(): pass\n")
    (folder / "test_null.py").write_bytes(b"def test_null(): pass\0\n")
    tests, problems = read_tests(tmp_path, ["tests"])
    assert [test.name for test in tests] == ["test_old"]
    assert [problem.partition(":")[0] for problem in problems] == ["tests/test_null.py", "tests/test_wrong.py"]


def test_environments_and_hidden_folders_below_the_root_are_not_read(tmp_path: Path) -> None:
    for name in ("test_a.py", ".tox/test_b.py", "build/test_c.py", "own-env/lib/test_d.py", "deep/er/test_e.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def test_x(): pass\n")
    (tmp_path / "own-env/pyvenv.cfg").write_text("")
    assert {test.path for test in read_tests(tmp_path, ["."])[0]} == {"test_a.py", "deep/er/test_e.py"}


def test_a_key_that_is_no_text_is_told() -> None:
    (problem,) = problems_of(HEAD + mark("one", more="extra_args={['a']: []}") + "def test_a(): pass\n")
    assert "extra_args has a key that is no text: ['a']" in problem
