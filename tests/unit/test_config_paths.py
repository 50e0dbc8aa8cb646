"""Variables in path keys: what is expanded, how, and what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.errors import ConfigError
from lockstep.config.load import dump_resolved, load_run_config
from lockstep.config.paths import PathTextError, escape, expand
from lockstep.driver.folder import no_recipe
from lockstep.recipes import find_recipe

SET = {"DATA": "/d", "EMPTY": "", "HOME": "/home/u", "B": "b c", "UNDER_1": "u"}


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("$DATA/x", "/d/x"),
        ("${DATA}x", "/dx"),
        ("${UNDER_1}/y$B", "u/yb c"),
        ("${NOT_SET:-data}/x", "data/x"),
        ("${EMPTY:-data}/x", "data/x"),
        ("${EMPTY-data}/x", "/x"),
        ("${NOT_SET-data}", "data"),
        ("${DATA:-${NOT_SET}}", "/d"),
        ("${NOT_SET:-${DATA}/in}/x", "/d/in/x"),
        ("${NOT_SET:-}x", "x"),
        ("~/x", "/home/u/x"),
        ("~", "/home/u"),
        ("${NOT_SET:-~/data}/x", "/home/u/data/x"),
        ("a~/x", "a~/x"),
        ("price\\$5", "price$5"),
        ("}{", "}{"),
    ],
)
def test_variables_are_expanded_as_a_shell_does(text: str, path: str) -> None:
    assert expand(text, SET) == path
    quoted = text.replace('"', '\\"')
    done = subprocess.run(  # the shell itself is the reference; word splitting is off where nothing is quoted
        ["sh", "-c", f'IFS=; v={quoted}; printf %s "$v"'], env=SET, capture_output=True, text=True, check=True
    )
    assert done.stdout == path


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("$NOT_SET/x", "NOT_SET is not set"),
        ("${NOT_SET}", "NOT_SET is not set"),
        ("${EMPTY}/x", "EMPTY is empty"),
        ("${NOT_SET:-${ALSO}}", "ALSO is not set"),
        ("${DATA", "only"),
        ("${DATA:-x", "does not close"),
        ("$(rm -rf x)", "no variable"),
        ("${DATA%.json}", "only"),
        ("$", "no variable"),
        ("$1", "no variable"),
        ("${NOT_SET:-" * 40, "within each other"),
    ],
)
def test_what_has_no_value_or_is_no_variable_is_refused(text: str, why: str) -> None:
    with pytest.raises(PathTextError, match=why):
        expand(text, SET)


@given(st.text())
def test_an_escaped_path_expands_to_itself(path: str) -> None:
    assume_no_home = path if not path.startswith("~") else "/" + path
    assert expand(escape(assume_no_home), {}) == assume_no_home


def load(*overrides: str) -> ConfigError | str:
    try:
        resolved = load_run_config("quickstart", overrides, find_recipe=find_recipe)
    except ConfigError as error:
        return error
    return resolved.config.task.path  # pyright: ignore[reportAttributeAccessIssue]


FILE = ("task.kind=file", "task.answer_key=answer")


def test_a_path_key_is_expanded_and_absolute_and_no_other_key_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DAPO", raising=False)
    assert load(*FILE, "task.path=${DAPO:-data}/a.jsonl") == str(tmp_path / "data/a.jsonl")
    monkeypatch.setenv("DAPO", "/elsewhere")
    assert load(*FILE, "task.path=$DAPO/a.jsonl") == "/elsewhere/a.jsonl"
    resolved = load_run_config("quickstart", ("description=$DAPO",), find_recipe=find_recipe)
    assert resolved.config.description == "$DAPO"


def test_an_unset_variable_is_a_problem_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAPO", raising=False)
    error = load(*FILE, "task.path=$DAPO/a.jsonl", "trainer.lr=3")
    assert isinstance(error, ConfigError)
    assert sorted(v.key for v in error.violations) == ["task.path", "trainer.lr"]
    assert 'task.path = "$DAPO/a.jsonl"  [--set]' in str(error)
    assert "${NAME:-data/file}" in str(error)


def test_a_variable_that_a_later_layer_replaces_need_not_be_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DAPO", raising=False)
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "quickstart"\nname = "m"\n[task]\nkind = "file"\npath = "$DAPO/a.jsonl"\n')
    resolved = load_run_config(str(mine), ("task.path=/b.jsonl",), find_recipe=find_recipe)
    assert resolved.config.task.model_dump()["path"] == "/b.jsonl"


def test_a_resolved_configuration_with_a_dollar_in_a_path_loads_again(tmp_path: Path) -> None:
    resolved = load_run_config("quickstart", (*FILE, "task.path=/a\\$b.jsonl"), find_recipe=find_recipe)
    again = tmp_path / "config.toml"
    again.write_text(dump_resolved(resolved))
    assert load_run_config(str(again), find_recipe=no_recipe).config == resolved.config
