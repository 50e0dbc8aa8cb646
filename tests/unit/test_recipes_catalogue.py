"""The catalogue of recipes: every one passes under every overlay and variant, overlays say only what differs and agree
with the evidence that they cite, and no recipe is a copy of another."""

from __future__ import annotations

import ast
import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

import lockstep.recipes
from lockstep.config.errors import ConfigError, Violation
from lockstep.config.load import flatten
from lockstep.config.schema import PathModel, RunConfig
from lockstep.driver.folder import open_run
from lockstep.driver.jobs import job_of
from lockstep.driver.plan_commands import evidence_lines, make_plan
from lockstep.driver.recipe_commands import cases_of, check_recipes, overlay_rows
from lockstep.driver.runnable import layout_facts, not_runnable, refuse_to_run
from lockstep.recipes import find_recipe, load_recipe, recipe_names
from lockstep.recipes.overlays import Overlay, as_changes, overlays_of, variants_of
from lockstep.topology.evidence import find_evidence, known_layouts
from lockstep.topology.pipeline import split_layers

NAMES = recipe_names()
OVERLAYS = [overlay for name in NAMES for overlay in overlays_of(name)]
OVERLAY_IDS = [f"{o.recipe} {o.hardware} {o.nodes or ''}".strip() for o in OVERLAYS]
FOLDER = Path(lockstep.recipes.__file__).parent
MAX_SHARED = 0.6
"""Largest share of one recipe's lines that another may have too: what two models in one format have in common."""


def test_every_recipe_passes_rules_memory_and_ledger_under_every_overlay_and_variant() -> None:
    checked = check_recipes()
    assert {name: [f"{case.label}: {text}" for case, text in one.problems] for name, one in checked.items()} == {
        name: [] for name in NAMES
    }
    assert sum(len(one.cases) for one in checked.values()) > 30


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_strict_about_variables(name: str) -> None:
    unread = 'environment.trainer.HF_NO_SUCH_SWITCH="1"'  # of an installed package, which does not know it
    case = next(iter(cases_of(name)))
    made = make_plan(load_recipe(name, [unread], hardware=case.hardware, nodes=case.nodes), {})
    assert [(one.rule, one.severity) for one in made.ledger.findings if one.severity != "note"] == [
        ("variable-unread", "error")
    ]
    assert find_recipe(name).environment.strict


def test_the_check_has_a_recipe_without_its_overlays_too() -> None:
    """Qwen3-4B runs on the machine at hand unless hardware is named: that case was left out."""
    labels = [case.label for case in cases_of("qwen3-4b")]
    assert labels == ["as it stands", "mi300x"]
    flash = [case.label for case in cases_of("deepseek-v4-flash")]
    assert "as it stands" not in flash
    assert {"mi355x, fp8", "mi355x, fp8 + parity + deterministic", "h200, fp8 + deterministic"} <= set(flash)
    assert not any("parity" in label for label in flash if not label.startswith("mi355x"))
    assert len(flash) == len(set(flash))


def test_the_catalogue_has_the_models_and_their_hardware() -> None:
    have = {name: {one.hardware for one in overlays_of(name)} for name in NAMES}
    assert {"mi355x", "h200", "h100", "gb300"} <= have["deepseek-v4-flash"]
    assert {"inkling", "inkling-small", "glm-5_2", "qwen3-30b-a3b", "qwen3-4b", "quickstart"} <= have.keys()
    pruned = {"deepseek-v4-flash-4layer", "glm-5_2-5layer", "inkling-small-4layer", "qwen3-30b-a3b-5layer"}
    assert pruned <= have.keys()


# --- overlays ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", OVERLAYS, ids=OVERLAY_IDS)
def test_an_overlay_repeats_the_layout_that_it_cites_as_evidence(one: Overlay) -> None:
    known = next(known for known in known_layouts() if known.name == one.evidence)
    job = job_of(load_recipe(one.recipe, hardware=one.hardware, nodes=one.nodes).config)
    assert find_evidence(job) == known
    assert (job.nodes, job.gpus_per_node, job.colocated) == (
        known.job.nodes,
        known.job.gpus_per_node,
        known.job.colocated,
    )
    assert job.train is not None
    assert known.job.train is not None
    layers = job.model.num_layers
    assert split_layers(layers, job.train) == split_layers(layers, known.job.train)
    assert job.train.sequence_parallel == known.job.train.sequence_parallel


def test_a_drifted_overlay_has_no_evidence() -> None:
    drifted = load_recipe("deepseek-v4-flash", ["trainer.layout.tp=2"], hardware="mi355x").config
    assert find_evidence(job_of(drifted)) is None


@pytest.mark.parametrize("one", OVERLAYS, ids=OVERLAY_IDS)
def test_an_overlay_names_only_what_differs_and_why(one: Overlay) -> None:
    base = flatten(find_recipe(one.recipe))
    for change in as_changes(one.changes(), ""):
        assert base.get(change.key) != change.value, f"{change.key} is what the recipe says already"
    assert all(len(why.strip()) > 5 for _, why in one.changes().values())


@pytest.mark.parametrize("name", [name for name in NAMES if variants_of(name)])
def test_a_variant_changes_something_in_every_case_and_says_what_it_is_for(name: str) -> None:
    for case in cases_of(name):
        if not case.variants:
            continue
        plain = load_recipe(name, hardware=case.hardware, nodes=case.nodes).config
        changed = case.load()
        assert flatten(changed.config) != flatten(plain)
        for variant in case.variants:
            assert any(origin.startswith(f"variant {variant}: ") for origin in changed.origins.values())
    groups = Counter(one.group for one in variants_of(name))
    assert all(count > 1 for count in groups.values()), "a choice of one is no choice"
    assert all(one.why for one in variants_of(name))


def test_the_difference_of_two_kinds_of_hardware_is_what_their_overlays_say() -> None:
    sides = [load_recipe("deepseek-v4-flash", hardware=hardware) for hardware in ("mi355x", "h200")]
    rows = overlay_rows(sides)
    said = {key for one in OVERLAYS if one.recipe == "deepseek-v4-flash" for key in one.changes()}
    assert set(rows) <= said
    assert [side["value"] for side in rows["trainer.layout.first_stage_layers"]] == [11, 4]
    assert [side["why"] for side in rows["cluster.nodes"]][1] == "141 GB a device: eight stages"
    assert not any(key.startswith(("algorithm", "task", "model", "gate")) for key in rows)
    assert all(left["value"] != right["value"] for left, right in rows.values())


# --- one function per model -------------------------------------------------------------------------------------------


def recipe_functions() -> dict[str, set[str]]:
    """The lines of each function that is marked as a recipe."""
    found: dict[str, set[str]] = {}
    for path in FOLDER.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and any(_is_call_of(d, "recipe") for d in node.decorator_list):
                lines = text.splitlines()[node.body[0].end_lineno : node.end_lineno]
                found[f"{path.stem}.{node.name}"] = {line.strip() for line in lines if len(line.strip()) > 3}
    return found


def _is_call_of(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def too_alike(functions: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Pairs of recipes that share more lines than two models have to."""
    pairs = itertools.combinations(functions, 2)
    return [
        (a, b)
        for a, b in pairs
        if len(functions[a] & functions[b]) > MAX_SHARED * min(len(functions[a]), len(functions[b]))
    ]


def test_no_recipe_is_a_copy_of_another() -> None:
    functions = recipe_functions()
    assert len(functions) >= 7
    assert too_alike(functions) == []
    name, lines = next(iter(functions.items()))
    copied = {**functions, "a copy for another vendor": {*lines, "steps=3,"} - {next(iter(lines))}}
    assert too_alike(copied) == [(name, "a copy for another vendor")]


def test_each_model_of_the_catalogue_has_one_recipe() -> None:
    models = Counter(
        config.model.catalogue
        for config in map(find_recipe, NAMES)
        if isinstance(config.model, PathModel) and config.model.catalogue
    )
    assert models
    assert max(models.values()) == 1


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_hardware_is_named_by_the_option_a_file_or_set_and_the_option_wins(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "deepseek-v4-flash"\nname = "mine"\n[cluster]\nhardware = "h200"\n')
    assert load_recipe(str(mine)).config.cluster.nodes == 8
    assert load_recipe("deepseek-v4-flash", ["cluster.hardware=gb300"]).config.trainer.layout.cp == 2
    chosen = load_recipe(str(mine), hardware="mi355x")
    assert (chosen.config.cluster.hardware, chosen.config.trainer.layout.pp) == ("mi355x", 4)
    assert chosen.origins["cluster.hardware"] == "--hardware"
    assert chosen.origins["trainer.layout.pp"] == "overlay mi355x: the nodes"
    assert load_recipe("deepseek-v4-flash").config.cluster.hardware == "mi355x"


def test_hardware_set_to_none_leaves_the_recipe_without_an_overlay() -> None:
    plain = load_recipe("deepseek-v4-flash", ["cluster.hardware=none"]).config
    assert (plain.cluster.hardware, plain.cluster.nodes, plain.trainer.layout.pp) == (None, 1, 1)


def test_nodes_choose_among_layouts_and_else_change_the_number_alone() -> None:
    assert load_recipe("inkling", nodes=12).config.trainer.layout.pp == 3
    assert load_recipe("inkling").config.trainer.layout.pp == 4
    other = load_recipe("inkling", nodes=20)
    assert (other.config.cluster.nodes, other.origins["cluster.nodes"]) == (20, "--nodes")
    assert other.config.trainer.layout.pp == 4


def test_a_file_over_a_recipe_wins_over_the_overlay(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "deepseek-v4-flash"\nname = "mine"\n[trainer.layout]\ntp = 8\n')
    assert load_recipe(str(mine), hardware="mi355x").config.trainer.layout.tp == 8


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hardware": "mi35x"}, 'there is no hardware "mi35x" in the catalogue'),
        ({"variants": ["fp9"]}, 'did you mean "fp8"?'),
        ({"variants": ["bf16", "fp8"]}, 'variants "bf16" and "fp8" are alternatives'),
        ({"variants": ["parity"], "hardware": "h200"}, 'variant "parity" is for mi355x, not for h200'),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_with_what_does(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_recipe("deepseek-v4-flash", **options)  # pyright: ignore[reportArgumentType]
    assert text in str(refused.value)


def test_an_unknown_model_of_the_catalogue_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r'did you mean "qwen3-4b"'):
        load_recipe("qwen3-4b", ["model.catalogue=qwen3-4"])


# --- running ----------------------------------------------------------------------------------------------------------


def test_what_lockstep_does_not_run_is_refused_by_name() -> None:
    keys = {violation.key for violation in not_runnable(load_recipe("deepseek-v4-flash").config)}
    assert keys == {"trainer.backend", "rollout.engine", "cluster.nodes"}
    vllm = load_recipe("deepseek-v4-flash", hardware="h100").config
    assert {v.key for v in not_runnable(vllm)} >= {"rollout.layout.tp", "rollout.layout.kv_cache_dtype"}
    for name in ("quickstart", "tiny-qwen3-moe", "tiny-deepseek-v4", "qwen3-4b"):
        assert not_runnable(load_recipe(name).config) == []
    with pytest.raises(
        ConfigError, match=r"does not run the megatron trainer yet(.|\n)*does not run the sglang engine"
    ):
        refuse_to_run(load_recipe("glm-5_2").config)


def test_replicas_of_a_model_on_one_rank_are_refused_and_not_ignored() -> None:
    def keys(*overrides: str) -> set[str]:
        return {violation.key for violation in not_runnable(load_recipe("quickstart", overrides).config)}

    assert keys("trainer.layout.replicate=2") == {"trainer.layout.replicate"}
    assert keys("trainer.layout.replicate=1") == set()
    assert keys("trainer.layout.replicate=2", "cluster.gpus_per_node=4") == {"cluster.nodes"}


def test_what_is_not_run_and_what_is_not_here_are_told_in_one_list(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(recipe: str, hardware: str) -> list[str]:
        with pytest.raises(ConfigError) as refused:
            refuse_to_run(load_recipe(recipe, hardware=hardware).config)
        return [violation.key for violation in refused.value.violations]

    def absent(config: RunConfig) -> list[Violation]:
        keys = ("device", "cluster.hardware", "cluster.gpus_per_node", "cluster.nodes")
        return [Violation(key, "is not here", "") for key in keys]

    monkeypatch.setattr("lockstep.driver.needs.absent_hardware", absent)
    whole = told("deepseek-v4-flash", "h200")
    assert whole == ["trainer.backend", "rollout.engine", "cluster.nodes", "device", "cluster.hardware"]
    assert told("qwen3-4b", "h100")[:3] == ["cluster.unverified", "device", "cluster.hardware"]


def test_a_layout_that_nobody_has_shown_runs_with_unverified_alone_and_that_is_kept() -> None:
    config = load_recipe("qwen3-4b", hardware="h100").config
    with pytest.raises(ConfigError, match="--unverified, which the run folder records"):
        refuse_to_run(config)
    allowed = load_recipe("qwen3-4b", hardware="h100", unverified=True)
    refuse_to_run(allowed.config)
    assert allowed.origins["cluster.unverified"] == "--unverified"
    facts = layout_facts(allowed.config)
    assert (facts["needs_evidence"], facts["unverified_allowed"], facts["verified"]) == (True, True, False)


def test_the_run_folder_keeps_that_its_layout_was_not_verified(tmp_path: Path) -> None:
    resolved = load_recipe("qwen3-4b", hardware="h100", unverified=True)
    opened = open_run(resolved, tmp_path / "run")
    opened.folder.close()
    assert "unverified = true  # --unverified" in (tmp_path / "run/config.toml").read_text()
    layout = json.loads((tmp_path / "run/environment.json").read_text())["layout"]
    assert (layout["unverified_allowed"], layout["verified"], layout["evidence"]) == (True, False, None)
    resumed = load_recipe(str(tmp_path / "run/config.toml"))
    refuse_to_run(resolved.config)  # the command that resumes it needs no option
    assert resumed.config == resolved.config


@pytest.mark.parametrize("hardware", [None, "cpu"])
def test_one_process_on_the_machine_at_hand_needs_no_evidence(hardware: str | None) -> None:
    config = load_recipe("quickstart", hardware=hardware).config
    refuse_to_run(config)
    assert layout_facts(config)["needs_evidence"] is False


def test_a_plan_and_the_run_folder_say_where_memory_is_not_the_runs() -> None:
    made = make_plan(load_recipe("inkling", hardware="gb300", nodes=12), {})
    said = "\n".join(evidence_lines(made))
    assert "whose fit is the plan's word" in said
    assert "memory.optimizer_offload_fraction 0 → 0.6 (not stated)" in said
    facts = layout_facts(made.resolved.config)
    assert facts["verified"]
    assert "memory.optimizer_offload_fraction 0 → 0.6 (not stated)" in facts["differs_in"]
    as_it_ran = make_plan(load_recipe("deepseek-v4-flash", variants=["fp8"]), {})
    assert "optimizer_offload" not in "".join(evidence_lines(as_it_ran))


def test_unverified_evidence_is_no_evidence() -> None:
    known = find_evidence(job_of(load_recipe("qwen3-30b-a3b", hardware="mi355x").config))
    assert known is not None
    assert not known.verified
    facts = layout_facts(load_recipe("qwen3-30b-a3b", hardware="mi355x").config)
    assert facts["known_as"] == "qwen3-30b-a3b-mi355x-4"
    assert not facts["verified"]
