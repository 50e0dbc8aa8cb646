"""What a plan selects, with the reason for each: labels, stages, changed files through imports, the always-run set."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.lanes import LanesError
from lockstep.lanes.catalogue import load_catalogue
from lockstep.lanes.changes import changed_files, reached_tests
from lockstep.lanes.read import read_tests
from lockstep.lanes.select import Decision, Request, all_cases, select
from tests.unit.lanes_planted import HEAD, commit, git, mark, plant

FILES = {
    "tests/test_always.py": "def test_always(): pass\n",
    "tests/test_plain.py": "def test_plain(): pass\n",
    "tests/test_gpu.py": HEAD
    + mark("one", '{"cuda": "h200", "rocm": "mi300x"}', more='labels=["replay"]')
    + "def test_replay(): pass\n"
    + mark("four", '{"cuda": "h200", "rocm": "mi350"}', more='labels=["megatron"]')
    + "def test_megatron(): pass\n"
    + mark("night", more='labels=["replay"]')
    + "def test_night(): pass\n"
    + mark("one", '{"rocm": "mi300x"}', more='disabled={"rocm": Disabled("hangs", "#1", "2030-01-01")}')
    + "def test_off(): pass\n",
}


def decisions(root: Path, request: Request) -> dict[tuple[str, str], Decision]:
    catalogue = load_catalogue(root)
    tests, problems = read_tests(root, catalogue.test_paths)
    assert problems == []
    made = select(all_cases(tests, catalogue), catalogue, request)
    assert all(one.reason for one in made), "each decision has a reason"
    return {(one.case.test_id.rpartition("::")[2], one.case.hardware): one for one in made}


def selected(root: Path, request: Request) -> set[tuple[str, str]]:
    return {key for key, one in decisions(root, request).items() if one.selected}


ALWAYS = ("test_always", "cpu")
PLAIN = ("test_plain", "cpu")
REPLAY = {("test_replay", "h200"), ("test_replay", "mi300x")}
MEGATRON = {("test_megatron", "h200"), ("test_megatron", "mi350")}


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Request(), {ALWAYS, PLAIN, *REPLAY, *MEGATRON}),
        (Request(labels=("replay",)), {ALWAYS, *REPLAY}),
        (Request(labels=("replay", "megatron")), {ALWAYS, *REPLAY, *MEGATRON}),
        (Request(labels=("run-amd", "replay")), {ALWAYS, ("test_replay", "mi300x")}),
        (Request(labels=("run-amd",)), {ALWAYS, PLAIN, ("test_replay", "mi300x"), ("test_megatron", "mi350")}),
        (Request(labels=("run-h200", "megatron")), {ALWAYS, ("test_megatron", "h200")}),
        (Request(labels=("run-nightly", "replay")), {ALWAYS, *REPLAY, ("test_night", "h200")}),
        (Request(stages=("nightly",)), {("test_night", "h200")}),
        (Request(stages=("cpu",)), {ALWAYS, PLAIN}),
        (Request(changed={}), {ALWAYS}),
        (Request(changed={"tests/test_plain.py": "it changed"}), {ALWAYS, PLAIN}),
        (Request(labels=("run-amd", "replay"), changed={"tests/test_plain.py": "x"}),
         {ALWAYS, PLAIN, ("test_replay", "mi300x")}),
    ],
)  # fmt: skip
def test_selection(tmp_path: Path, request_: Request, expected: set[tuple[str, str]]) -> None:
    assert selected(plant(tmp_path, FILES), request_) == expected


def test_reasons_say_which_rule_decided(tmp_path: Path) -> None:
    root = plant(tmp_path, FILES)
    made = decisions(root, Request(labels=("run-amd", "replay"), changed={"tests/test_plain.py": "mine/a.py changed"}))
    assert made[ALWAYS].reason == "always run"
    assert made[PLAIN].reason == "mine/a.py changed"
    assert made["test_replay", "mi300x"].reason == "label replay"
    assert made["test_replay", "h200"].reason == "h200 is not among what run-amd picks"
    assert made["test_megatron", "mi350"].reason == "carries none of replay and no changed file reaches it"
    assert made["test_off", "mi300x"].reason == "disabled until 2030-01-01: hangs (#1)"
    assert made["test_night", "h200"].reason.startswith("nightly is planned only when asked for")


def test_unknown_labels_and_stages_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(LanesError) as error:
        decisions(plant(tmp_path, FILES), Request(labels=("run-amd", "reply"), stages=("gpu",)))
    assert str(error.value).splitlines() == [
        "unknown label reply; known: run-amd, run-h200, run-nightly, replay, megatron",
        "unknown stage gpu; known: cpu, one-gpu, several, nightly",
    ]


# --- changed files ----------------------------------------------------------------------------------------------------

TREE = {
    "mine/__init__.py": "",
    "mine/low.py": "X = 1\n",
    "mine/high.py": "def use():\n    from mine.low import X\n    return X\n",
    "mine/typed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mine.low import X\n",
    "mine/other.py": "",
    "mine/found_by_name.py": "",
    "mine/sub/__init__.py": "",
    "mine/sub/deep.py": "",
    "mine/sub/table.json": "{}",
    "tests/conftest.py": "",
    "tests/helpers.py": "from mine.high import use\n",
    "tests/test_direct.py": "from mine.low import X\ndef test_direct(): pass\n",
    "tests/test_lazy.py": "def test_lazy():\n    from mine import high\n",
    "tests/test_helped.py": "from helpers import use\ndef test_helped(): pass\n",
    "tests/test_typed.py": "import mine.typed\ndef test_typed(): pass\n",
    "tests/test_other.py": "from mine import other\ndef test_other(): pass\n",
    "tests/test_deep.py": "import mine.sub.deep\ndef test_deep(): pass\n",
    "tests/test_docs.py": "def test_docs(): pass\n",
    "mine/fixture.py": "",
    "tests/below/conftest.py": "import mine.fixture\n",
    "tests/below/test_below.py": "def test_below(): pass\n",
}
ALL = {name for name in TREE if "/test_" in name}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("mine/low.py", {"test_direct", "test_lazy", "test_helped"}),
        ("mine/high.py", {"test_lazy", "test_helped"}),
        ("mine/other.py", {"test_other"}),
        ("mine/sub/__init__.py", {"test_deep"}),
        ("mine/sub/table.json", {"test_deep"}),
        (
            "mine/__init__.py",
            {"test_direct", "test_lazy", "test_helped", "test_typed", "test_other", "test_deep", "test_below"},
        ),
        ("tests/helpers.py", {"test_helped"}),
        ("tests/test_other.py", {"test_other"}),
        ("tests/below/conftest.py", {"test_below"}),
        ("mine/fixture.py", {"test_below"}),
        ("tests/test_deleted.py", set()),
        ("docs/a.md", {"test_docs"}),
    ],
)
def test_a_changed_file_reaches_the_tests_that_import_it(tmp_path: Path, changed: str, expected: set[str]) -> None:
    root = plant(tmp_path, TREE)
    reasons = reached_tests(root, load_catalogue(root), [changed])
    assert {Path(name).stem for name in reasons} == expected
    assert all(changed in reason or reason == "it changed" for reason in reasons.values())


@pytest.mark.parametrize(
    "changed", ["mine/found_by_name.py", "Makefile", "strange.bin", "requirements.lock", "tests/conftest.py"]
)
def test_a_file_whose_readers_are_not_known_reaches_every_test(tmp_path: Path, changed: str) -> None:
    root = plant(tmp_path, TREE)
    assert set(reached_tests(root, load_catalogue(root), [changed])) == ALL


def test_the_reason_shows_the_chain(tmp_path: Path) -> None:
    root = plant(tmp_path, TREE)
    reasons = reached_tests(root, load_catalogue(root), ["mine/low.py"])
    assert reasons["tests/test_direct.py"] == "mine/low.py changed, imported through mine/low.py"
    assert reasons["tests/test_helped.py"] == (
        "mine/low.py changed, imported through mine/low.py ← mine/high.py ← tests/helpers.py"
    )


def test_changes_are_committed_ones_of_the_branch_and_those_of_the_tree(tmp_path: Path) -> None:
    root = commit(plant(tmp_path, {**TREE, ".gitignore": "*.log\n"}))
    git(root, "checkout", "-q", "-b", "work")
    (root / "mine/other.py").write_text("Y = 1\n")
    (root / "mine/low.py").unlink()
    commit(root)
    git(root, "checkout", "-q", "main")
    (root / "mine/high.py").write_text("changed on main\n")
    commit(root)
    git(root, "checkout", "-q", "work")
    (root / "new file.py").write_text("")
    (root / "run.log").write_text("")
    assert changed_files(root, "main") == ["mine/low.py", "mine/other.py", "new file.py"]


def test_a_deleted_module_reaches_the_tests_that_still_import_it(tmp_path: Path) -> None:
    root = plant(tmp_path, TREE)
    (root / "mine/low.py").unlink()
    reached = reached_tests(root, load_catalogue(root), ["mine/low.py"])
    assert {"tests/test_direct.py", "tests/test_lazy.py", "tests/test_helped.py"} <= set(reached)


def test_an_unknown_commit_says_to_fetch_the_history(tmp_path: Path) -> None:
    root = commit(plant(tmp_path, TREE))
    with pytest.raises(LanesError, match="fetch-depth: 0"):
        changed_files(root, "origin/main")
    with pytest.raises(LanesError, match="--changed-since"):
        changed_files(root, "--output=x")
    assert not (root / "x").exists()


def test_what_the_root_conftest_imports_reaches_every_test(tmp_path: Path) -> None:
    """A test that imports the module itself must not make the others look unreached."""
    files = {
        "conftest.py": "import mine.shared\npytest_plugins = ['mine.plugin']\n",
        "mine/shared.py": "",
        "mine/plugin.py": "",
        "tests/test_a.py": "import mine.shared, mine.plugin\n",
        "tests/test_b.py": "def test_b(): pass\n",
    }
    root = plant(tmp_path, files)
    for name in ("conftest.py", "mine/shared.py", "mine/plugin.py"):
        assert set(reached_tests(root, load_catalogue(root), [name])) == {"tests/test_a.py", "tests/test_b.py"}


def test_a_project_below_the_top_of_its_repository_knows_its_own_changes(tmp_path: Path) -> None:
    """git tells names from the top, and a changed test file under another name was taken for a deleted one."""
    root = plant(tmp_path / "sub", {"tests/test_a.py": "def test_a(): pass\n", "mine/gone.py": ""})
    plant(tmp_path / "other", {})
    commit(tmp_path)
    git(tmp_path, "checkout", "-q", "-b", "branch")
    (root / "tests/test_a.py").write_text("def test_a(): assert 1\n")
    (root / "mine/gone.py").rename(root / "mine/moved.py")
    commit(tmp_path)
    (tmp_path / "other/lanes.toml").write_text("changed")
    (root / "mine/new.py").write_text("")
    changed = changed_files(root, "main")
    assert changed == ["../other/lanes.toml", "mine/gone.py", "mine/moved.py", "mine/new.py", "tests/test_a.py"]
    assert reached_tests(root, load_catalogue(root), ["tests/test_a.py"]) == {"tests/test_a.py": "it changed"}


def test_a_submodule_that_moves_reaches_every_test(tmp_path: Path) -> None:
    commit(plant(tmp_path / "library", {}))
    root = commit(plant(tmp_path / "project", {"tests/test_a.py": "def test_a(): pass\n"}))
    git(root, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(tmp_path / "library"), "vendored")
    commit(root)
    git(root, "checkout", "-q", "-b", "branch")
    commit(root / "vendored")
    commit(root)
    assert changed_files(root, "main") == ["vendored"]
    assert set(reached_tests(root, load_catalogue(root), ["vendored"])) == {"tests/test_a.py"}


def test_after_a_merge_of_the_base_only_the_branchs_own_changes_count(tmp_path: Path) -> None:
    root = commit(plant(tmp_path, {}))
    git(root, "checkout", "-q", "-b", "branch")
    (root / "mine/own.py").write_text("")
    commit(root)
    git(root, "checkout", "-q", "main")
    (root / "mine/theirs.py").write_text("")
    commit(root)
    git(root, "checkout", "-q", "branch")
    git(root, "merge", "-q", "--no-edit", "main")
    assert changed_files(root, "main") == ["mine/own.py"]


def test_a_deleted_module_that_is_named_like_a_test_reaches_every_test(tmp_path: Path) -> None:
    root = plant(tmp_path, {"tests/test_a.py": "def test_a(): pass\n"})
    assert set(reached_tests(root, load_catalogue(root), ["mine/load_test.py"])) == {"tests/test_a.py"}
    assert reached_tests(root, load_catalogue(root), ["tests/test_gone.py"]) == {}
