"""Loading: layers, origins, paths, the resolved dump, and errors that name key, value, origin, allowed and way out."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.errors import ConfigError, Violation
from lockstep.config.keys import walk
from lockstep.config.load import dump_resolved, flatten, load_run_config, resolve_config
from lockstep.config.schema import (
    ArithmeticTask,
    BoundConfig,
    GateConfig,
    GgufModel,
    RandomModel,
    RunConfig,
    TrainerConfig,
)
from lockstep.config.toml_text import format_value, split_dotted, value_lines
from lockstep.recipes import load_recipe

BASE = RunConfig(
    name="base",
    steps=20,
    model=GgufModel(package="some-weights"),
    task=ArithmeticTask(max_operand=30),
    gate=GateConfig(bounds=(BoundConfig(bound=0.05, evidence="test"),)),
    trainer=TrainerConfig(learning_rate=1e-5),
)
TINY = RunConfig(
    name="tiny",
    steps=3,
    model=RandomModel(model_type="qwen3", config={"hidden_size": 64, "sizes": [1, 2], "rope": {"theta": 1e4}}),
    task=ArithmeticTask(),
    gate=GateConfig(bounds=(BoundConfig(bound=1e-5, evidence="test"),)),
)


def find(name: str) -> RunConfig:
    recipes = {"base": BASE, "tiny": TINY}
    if name not in recipes:
        raise ConfigError(name, [Violation("", "no such recipe", "use base")])
    return recipes[name]


def load(recipe: str, *overrides: str) -> Any:
    return load_run_config(recipe, overrides, find_recipe=find)


def refused(recipe: str, *overrides: str) -> dict[str, Violation]:
    """Violations by key of a configuration that must be refused."""
    with pytest.raises(ConfigError) as caught:
        load(recipe, *overrides)
    return {violation.key: violation for violation in caught.value.violations}


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


# --- layers and origins -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["checkpoint.skip_scheduler", "checkpoint.skip_progress", "trainer.skip_optimizer"])
def test_a_resume_has_no_switch_that_leaves_state_out(key: str) -> None:
    """PrimeIntellect-ai/prime-rl#2088: such flags were accepted, and one of two trainers ignored them. Here a resume
    takes the whole state, whose other tests are in ``tests/contract/test_trainer_checkpoint.py``."""
    assert key in refused("base", f"{key}=true")
    assert not [k for k in walk() if k.path[-1].startswith("skip")]


def test_a_recipe_loads_as_it_is_and_tells_its_values_from_defaults() -> None:
    resolved = load("base")
    assert resolved.config == BASE
    assert resolved.origins["trainer.learning_rate"] == "recipe base"
    assert resolved.origins["model.source"] == "recipe base"
    assert resolved.origins["trainer.beta1"] == "default"
    assert resolved.origins["rollout.num_slots"] == "default"
    assert set(resolved.origins) == set(flatten(BASE))


def test_a_file_extends_a_recipe_and_set_wins_over_both(tmp_path: Path) -> None:
    text = '# mine\nextends = "base"\nsteps = 30\n\n[trainer]\nlearning_rate = 2e-5\nbeta1 = 0.8\n'
    text += '[[task.rewards]]\nname = "exact"\n'
    path = write(tmp_path, "my.toml", text)
    resolved = load(path, "trainer.learning_rate=3e-5", "prompt.suffix=Answer:")
    config, origins = resolved.config, resolved.origins
    assert (config.steps, config.trainer.learning_rate, config.trainer.beta1) == (30, 3e-5, 0.8)
    assert config.task.max_operand == 30
    assert [r.name for r in config.task.rewards] == ["exact"]
    assert origins["steps"] == f"file {path}:3"
    assert origins["trainer.beta1"] == f"file {path}:7"
    assert origins["task.rewards"] == f"file {path}:8"
    assert origins["trainer.learning_rate"] == origins["prompt.suffix"] == "--set"
    assert origins["task.max_operand"] == "recipe base"


def test_files_extend_files_relative_to_themselves(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", 'extends = "base"\nsteps = 7\nseed = 1\n')
    path = write(tmp_path, "sub/mine.toml", 'extends = "../base.toml"\nseed = 2\n')
    assert (load(path).config.steps, load(path).config.seed) == (7, 2)


def test_a_circle_of_extends_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.toml", 'extends = "b.toml"\n')
    path = write(tmp_path, "b.toml", 'extends = "a.toml"\n')
    with pytest.raises(ConfigError, match=r"circle: .*b\.toml → .*a\.toml → .*b\.toml"):
        load(path)


def test_a_file_without_extends_must_be_complete(tmp_path: Path) -> None:
    violations = refused(write(tmp_path, "part.toml", 'name = "part"\nsteps = 3\n'))
    assert set(violations) == {"model", "task", "gate"}
    assert "required" in violations["gate"].message


def test_changing_the_kind_of_a_section_replaces_it_whatever_the_order_of_set() -> None:
    for overrides in (("model.source=path", "model.path=/m"), ("model.path=/m", "model.source=path")):
        assert load("tiny", *overrides).config.model.model_dump(exclude_none=True) == {"source": "path", "path": "/m"}
    assert load("base", "task.kind=reasoning_gym", "task.dataset=leg_counting").config.task.num_train == 1000
    assert load("base", "task.kind=reasoning_gym", "task.dataset=x").origins["task.num_train"] == "default"


def test_a_section_of_the_same_kind_and_free_tables_are_merged() -> None:
    config = load("tiny", "model.config.hidden_size=32", "model.source=random").config
    assert config.model.config == {"hidden_size": 32, "sizes": [1, 2], "rope": {"theta": 1e4}}
    assert load("base", "task={ num_heldout = 70, seed = 3 }").config.task.max_operand == 30


def test_none_is_set_by_the_bare_word_and_by_unset(tmp_path: Path) -> None:
    assert load("base", "trainer.clip_grad_norm=none").config.trainer.clip_grad_norm is None
    assert load("base", 'prompt.system="none"').config.prompt.system == "none"
    path = write(tmp_path, "u.toml", 'extends = "base"\nunset = ["trainer.clip_grad_norm"]\n')
    assert load(path).config.trainer.clip_grad_norm is None
    assert load(path).origins["trainer.clip_grad_norm"] == f"file {path}:2"
    assert "trainer.beta1" in refused("base", "trainer.beta1=none")


def test_relative_paths_belong_to_the_file_that_sets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'extends = "base"\n[task]\nkind = "file"\npath = "data/train.jsonl"\n'
    path = write(tmp_path, "conf/my.toml", text)
    monkeypatch.chdir(tmp_path)
    assert load(path).config.task.path == str(tmp_path / "conf/data/train.jsonl")
    assert load(path, "task.path=x.jsonl").config.task.path == str(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("text", "value"),
    [("hi there", "hi there"), ('"1"', "1"), ("a=b", "a=b"), ("", ""), ("1\nseed = 2", "1\nseed = 2"), ("é ≤", "é ≤")],
)
def test_a_set_value_that_is_no_toml_is_text(text: str, value: str) -> None:
    assert load("base", f"prompt.suffix={text}").config.prompt.suffix == value


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key", "way_out"),
    [
        ("trainer.lr=1e-5", "trainer.lr", "trainer.learning_rate"),
        ("trainer.learning_rte=1e-5", "trainer.learning_rte", "trainer.learning_rate"),
        ("algorithm.max_new_tokens=9", "algorithm.max_new_tokens", "rollout.max_new_tokens"),
        ("kl.place=off", "kl", "algorithm.kl"),
        ("algorithm.kl.coeficient=0.1", "algorithm.kl.coeficient", "algorithm.kl.coefficient"),
        ("model.model_type=qwen3", "model.model_type", 'model.source is "random", it is "gguf"'),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(override: str, key: str, way_out: str) -> None:
    violation = refused("base", override)[key]
    assert violation.message == "unknown key"
    assert way_out in violation.way_out


def test_a_key_unlike_any_other_gets_no_false_suggestion() -> None:
    assert "did you mean" not in refused("base", "qqqq=1")["qqqq"].way_out


@pytest.mark.parametrize(
    ("override", "allowed", "way_out"),
    [
        ('steps="3"', "an integer ≥ 1", "without quotes"),
        ("steps=3.0", "an integer ≥ 1", ""),
        ("steps=true", "an integer ≥ 1", ""),
        ("steps=0", "an integer ≥ 1", ""),
        ("name=12", "text", '"12"'),
        ("trainer.gradient_checkpointing=True", "true or false", "write true"),
        ("trainer.gradient_checkpointing=1", "true or false", ""),
        ("trainer.beta1=1.0", "a number ≥ 0 and < 1", ""),
        ("trainer.learning_rate=.5", "a number > 0", "0.5"),
        ("rollout.temperature=-0.5", "a number > 0", ""),
        ("rollout.temperature=inf", "a number > 0", ""),
        ("rollout.temperature=nan", "a number > 0", ""),
        ("rollout.dtype=bfloat61", '"bfloat16", "float32"', '"bfloat16"'),
        ("algorithm.dual_clip=0.5", "a number > 1, or none", ""),
        ("rollout.stop_strings=x", "a list, each item text", ""),
        ('task.operations=["+", "/"]', '"+", "-", "*"', ""),
        ("trainer=3", "a table with learning_rate", ""),
        ("model.source=ggfu", '"path", "gguf", "random"', ""),
        ("description=2026-01-01", "", "quote it"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused_with_what_is_allowed(
    override: str, allowed: str, way_out: str
) -> None:
    key = override.partition("=")[0]
    (violation,) = (v for k, v in refused("base", override).items() if k.split("[")[0] == key)
    assert allowed in (violation.allowed or "")
    assert way_out in violation.way_out
    assert "[--set]" in violation.settings[0]


def test_a_wrong_item_of_a_list_of_tables_is_located() -> None:
    violations = refused("base", 'task.rewards=[{ name = "exact" }, { name = "exact", wieght = 1 }]')
    assert "task.rewards[1].wieght" in violations


@pytest.mark.parametrize("override", ["steps", "=3", "a b=3", "a..b=1", "\udcff=1", "prompt.suffix=\udcff"])
def test_an_unreadable_set_is_refused(override: str) -> None:
    assert "can't be read" in refused("base", override)[""].message


def test_every_problem_is_reported_at_once_with_its_origin(tmp_path: Path) -> None:
    text = 'extends = "base"\nsteps = "many"\n[rollout]\ntop_p = 0.9\n[trainer]\nlr = 1\n'
    path = write(tmp_path, "bad.toml", text)
    text = refused_text(path, "algorithm.group_size=1")
    assert "4 problems" in text
    assert f'steps = "many"  [file {path}:2]' in text
    assert f"rollout.top_p = 0.9  [file {path}:4]" in text
    assert f"trainer.lr = 1  [file {path}:6]" in text
    assert "algorithm.group_size = 1  [--set]" in text


def refused_text(recipe: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(recipe, *overrides)
    return str(caught.value)


def test_wrong_values_do_not_hide_settings_that_disagree() -> None:
    keys = set(refused("base", "steps=many", "trainer.lr=1", "rollout.top_p=0.9", "algorithm.group_size=1"))
    assert keys == {"steps", "trainer.lr", "rollout.top_p", "algorithm.group_size"}


def test_a_wrong_value_causes_no_second_violation_of_a_rule_that_reads_it() -> None:
    keys = set(refused("base", "algorithm.aggregation=token_sum_nrom", "algorithm.length_norm=64"))
    assert keys == {"algorithm.aggregation"}


@pytest.mark.parametrize("where", ["set", "file", "recipe"])
def test_rules_hold_for_every_way_to_write_a_setting(where: str, tmp_path: Path) -> None:
    if where == "set":
        keys = set(refused("base", "algorithm.group_size=1"))
    elif where == "file":
        keys = set(refused(write(tmp_path, "g.toml", 'extends = "base"\nalgorithm.group_size = 1\n')))
    else:
        bad = BASE.model_copy(update={"algorithm": BASE.algorithm.model_copy(update={"group_size": 1})})
        with pytest.raises(ConfigError) as caught:
            resolve_config(bad, "recipe bad")
        keys = {v.key for v in caught.value.violations}
    assert keys == {"algorithm.group_size"}


def test_a_disagreement_shows_both_settings_and_where_they_come_from() -> None:
    text = refused_text("base", "algorithm.length_norm=64")
    assert "algorithm.length_norm = 64  [--set]" in text
    assert 'algorithm.aggregation = "token_mean"  [default]' in text
    assert "way out:" in text


@pytest.mark.parametrize(
    ("content", "fragment"),
    [("steps = \n", "line 1"), ("extends = 3\n", "is not text"), ('extends = "base"\nunset = "x"\n', "list of keys")],
)
def test_a_broken_file_is_refused_with_its_name(content: str, fragment: str, tmp_path: Path) -> None:
    text = refused_text(write(tmp_path, "broken.toml", content))
    assert "broken.toml" in text
    assert fragment in text


def test_a_missing_file_is_refused() -> None:
    assert "can't be read" in refused_text("nowhere.toml")


def test_there_is_one_length_limit_and_no_evaluation_temperature() -> None:
    keys = set(refused("base", "eval.temperature=-0.5", "rollout.max_tokens=5", "task.max_new_tokens=5"))
    assert keys == {"eval.temperature", "rollout.max_tokens", "task.max_new_tokens"}


# --- the resolved dump ------------------------------------------------------------------------------------------------


def reload(text: str, folder: Path) -> RunConfig:
    return load(write(folder, "config.toml", text)).config


@pytest.mark.parametrize("overrides", [(), ("trainer.clip_grad_norm=none", "threads=3"), ("model.config.pad=none",)])
def test_the_dump_loads_to_the_same_configuration(overrides: tuple[str, ...], tmp_path: Path) -> None:
    resolved = load("tiny", *overrides)
    text = dump_resolved(resolved)
    assert reload(text, tmp_path) == resolved.config
    assert "learning_rate = 1e-06  # default" in text
    assert "steps = 3  # recipe tiny" in text


plain = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.c é\"'\n#", max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(
    free=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), plain | st.none(), max_size=4),
    text=st.text(st.characters(exclude_categories=["Cs"])),
    rate=st.floats(min_value=1e-300, max_value=1e300),
    clip=st.none() | st.floats(min_value=0.1, max_value=9),
    stops=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=3),
)
def test_any_dump_loads_to_the_same_configuration(
    free: dict[str, Any], text: str, rate: float, clip: float | None, stops: list[str], tmp_path_factory: Any
) -> None:
    config = RunConfig(
        name="any",
        description=text,
        steps=3,
        model=RandomModel(model_type="qwen3", config=free),
        task=ArithmeticTask(),
        gate=GateConfig(bounds=(BoundConfig(bound=1e-5, evidence=f"seen: {text}"),)),
        trainer=TrainerConfig(learning_rate=rate, clip_grad_norm=clip),
        rollout=BASE.rollout.model_copy(update={"stop_strings": tuple(stops)}),
    )
    resolved = resolve_config(config, "recipe any\x7f\n")
    assert resolved.config == config
    assert reload(dump_resolved(resolved), tmp_path_factory.getbasetemp()) == config


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5), plain, min_size=1))
def test_written_values_and_their_lines_are_read_back(values: dict[str, Any]) -> None:
    text = "".join(f"# note\n{format_value(key)} = {format_value(value)}\n" for key, value in values.items())
    assert tomllib.loads(text) == values
    lines = value_lines(text)
    assert [lines.get((key,)) for key, value in values.items() if not isinstance(value, dict)] == [
        2 * n + 2 for n, value in enumerate(values.values()) if not isinstance(value, dict)
    ]


def test_lines_of_values_that_span_lines_and_of_tables() -> None:
    text = 'a = [\n  1,\n]\ns = """\nx = 1\n[b]\n"""\n\n[b.c]\nx.y = 1\n[[b.d]]\nz = 1\n[[b.d]]\nz = 2\n'
    assert value_lines(text) == {("a",): 1, ("s",): 4, ("b", "c", "x", "y"): 10, ("b", "d"): 11}
    assert value_lines(text.replace("\n", "\r\n")) == value_lines(text)


def test_what_toml_cannot_say_is_an_error() -> None:
    with pytest.raises(ValueError, match="no way to write None"):
        format_value([None])
    with pytest.raises(ValueError, match="not a key"):
        split_dotted("a = 1\nb")


def test_the_word_none_is_a_choice_where_the_key_has_it_and_unsets_elsewhere() -> None:
    resolved = load_recipe("tiny-qwen3-moe", ["rollout.quantisation=none", "trainer.clip_grad_norm=none"])
    assert resolved.config.rollout.quantisation == "none"
    assert resolved.config.trainer.clip_grad_norm is None
