"""The effective configuration: every accepted key of the cluster sections changes the printed arguments or is refused
(fault D1), every entry of the catalogue is of a key that exists and can be set (fault D3), and nothing is lost on the
way to a program (fault D15)."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import pytest

from lockstep.config.errors import ConfigError
from lockstep.config.keys import all_keys, sections
from lockstep.config.schema import RunConfig
from lockstep.config.toml_text import dotted, format_value
from lockstep.driver.arguments import FORMS, PROGRAMS, effective, settings_in_force
from lockstep.driver.determinism import determinism_findings
from lockstep.recipes import load_recipe
from lockstep.topology.catalogue import read_catalogue

CATALOGUE = read_catalogue("engine_args")
ENTRIES = [(program, key, entry) for program, table in CATALOGUE.items() for key, entry in table.items()]
FORM_OF_AN_ENTRY = {"flag", "assign", "switch", "values", "text"}

BASES = {
    "megatron and sglang": ("deepseek-v4-flash", ["cluster.hardware=mi355x"]),
    "megatron and vllm": ("deepseek-v4-flash", ["cluster.hardware=h100"]),
    "fsdp and torch": ("qwen3-4b", []),
}
CLUSTER_SECTIONS = ("cluster.", "trainer.layout.", "trainer.megatron.", "rollout.layout.", "rollout.sglang.")
CLUSTER_KEYS = sorted(
    {dotted(k.path) for k in all_keys() if k.is_leaf and dotted(k.path).startswith(CLUSTER_SECTIONS)}
    | {"trainer.backend", "rollout.engine"}
)
NOT_AN_ARGUMENT = {"cluster.unverified"}
"""Lockstep's own consent; ``test_recipes_catalogue.py`` shows its effect."""

OTHER_VALUES: dict[str, Any] = {
    "cluster.hardware": "mi300x",
    "rollout.layout.moe_a2a": "deepep",
    "rollout.layout.memory_fraction": 0.41,
    "rollout.sglang.engine_args": {"page_size": 64},
    "trainer.layout.stage_layers": [22, 21],
    "trainer.megatron.optimizer_offload_fraction": 0.31,
}
"""For keys whose type does not say which values there are."""


def other_value(key: str, now: Any) -> Any:
    """A value of the key's type that is not the one it has."""
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    annotation = next(k.field.annotation for k in all_keys() if dotted(k.path) == key)
    options = [annotation, *get_args(annotation)]
    for option in options:
        if get_origin(option) is Literal:
            return next(choice for choice in get_args(option) if choice != now)
        if option is bool:
            return not now
        if option is int:
            return (now or 0) + 7
    raise AssertionError(f"no other value for {key}: {annotation}")


def value_of(config: RunConfig, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


def loaded_or_refused(name: str, overrides: list[str]) -> RunConfig | ConfigError:
    try:
        return load_recipe(name, overrides).config
    except ConfigError as refused:
        return refused


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("key", [key for key in CLUSTER_KEYS if key not in NOT_AN_ARGUMENT])
def test_every_cluster_key_changes_the_arguments_or_is_refused_by_name(key: str, base: str) -> None:
    """Fault D1."""
    name, overrides = BASES[base]
    config = load_recipe(name, overrides).config
    value = other_value(key, value_of(config, key))
    varied = loaded_or_refused(name, [*overrides, f"{key}={format_value(value)}"])
    if isinstance(varied, ConfigError):
        named = {k for violation in varied.violations for k in (violation.key, *violation.also)}
        assert any(k.startswith(key) for k in named), f"refused, but not for {key}: {varied}"
        return
    assert value_of(varied, key) != value_of(config, key)
    assert effective(varied).lines() != effective(config).lines(), f"{key} = {value} has no effect"


def test_the_variation_would_find_a_key_without_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOGUE["megatron"], "trainer.layout.vocab_divisor", {"values": {"128": "", "135": ""}})
    config = load_recipe("deepseek-v4-flash").config
    varied = load_recipe("deepseek-v4-flash", ["trainer.layout.vocab_divisor=135"]).config
    assert effective(varied).lines() == effective(config).lines()


@pytest.mark.parametrize(("program", "key", "entry"), ENTRIES, ids=[f"{p} {k}" for p, k, _ in ENTRIES])
def test_every_entry_is_of_a_key_that_exists_and_has_a_source(program: str, key: str, entry: dict[str, Any]) -> None:
    """Fault D3: what the catalogue maps can be set."""
    assert program in PROGRAMS
    known = {dotted(k.path): k for k in all_keys() if k.is_leaf}
    assert key in known, f"{key} is no key of the schema"
    assert len(entry.keys() & FORM_OF_AN_ENTRY) == 1
    assert entry.get("form", "short") in FORMS
    project, _, place = entry["source"].partition(" ")
    assert project.count("/") == 1
    assert place.strip()
    if "values" in entry and "form" not in entry:
        annotation = known[key].field.annotation
        choices = {str(c) for option in (annotation, *get_args(annotation)) for c in get_args(option)} | {
            str(choice) for choice in get_args(annotation)
        }
        assert set(entry["values"]) <= choices


def test_a_setting_without_a_mapping_is_unmapped_and_never_invented() -> None:
    """Fault D15: what does not get through is said."""
    found = effective(load_recipe("deepseek-v4-flash", hardware="h100").config)
    unmapped = {one.key: one.value for one in found.unmapped}
    assert unmapped["rollout.quantisation"] == "mxfp4_experts"  # vLLM has no such argument
    assert "unmapped (no sourced argument):" in found.lines()
    assert "  rollout.quantisation = mxfp4_experts" in found.lines()
    assert all(argument.source for argument in found.arguments)


def test_every_setting_that_differs_from_its_default_is_mapped_or_unmapped() -> None:
    for name, overrides in BASES.values():
        config = load_recipe(name, overrides).config
        found = effective(config)
        said = {argument.key for argument in found.arguments} | {one.key for one in found.unmapped}
        for key, value in settings_in_force(config):
            if not key.startswith(("trainer.", "rollout.layout.")) or value is None or value == []:
                continue
            entry = next((table[key] for table in CATALOGUE.values() if key in table), None)
            default = next(k.field.get_default() for k in all_keys() if dotted(k.path) == key)
            assert (
                key in said
                or value == default
                or (entry or {}).get("values", {}).get(str(value)) == ""
                or key in ("trainer.backend",)
            ), f"{key} = {value} is neither mapped nor unmapped"


def arguments(name: str, program: str, **options: Any) -> list[str]:
    return [a.text for a in effective(load_recipe(name, **options).config).arguments if a.program == program]


def test_deepseek_on_mi355x_means_the_arguments_of_its_public_script() -> None:
    megatron = arguments("deepseek-v4-flash", "megatron", hardware="mi355x")
    assert {
        "--tensor-model-parallel-size 4",
        "--sequence-parallel",
        "--pipeline-model-parallel-size 4",
        "--decoder-first-pipeline-num-layers 11",
        "--decoder-last-pipeline-num-layers 10",
        "--context-parallel-size 1",
        "--expert-model-parallel-size 8",
        "--expert-tensor-parallel-size 1",
        "--recompute-granularity full",
        "--recompute-method uniform",
        "--recompute-num-layers 1",
        "--micro-batch-size 1",
        "--lr 1e-06",
        "--weight-decay 0.1",
        "--adam-beta2 0.98",
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.75",
        "--use-precision-aware-optimizer",
        "--accumulate-allreduce-grads-in-fp32",
    } <= set(megatron)
    assert {
        "--actor-num-nodes 4",
        "--colocate",
        "--no-offload-train",
        "--max-tokens-per-gpu 2048",
        "--qkv-format bshd",
        "--rollout-batch-size 32",
        "--n-samples-per-prompt 8",
        "--num-steps-per-rollout 1",
        "--rollout-temperature 0.8",
        "--rollout-max-response-len 8192",
        "--use-rollout-routing-replay",
        "--update-weight-buffer-size 1073741824",
    } <= set(arguments("deepseek-v4-flash", "miles", hardware="mi355x"))
    assert {
        "--tp-size 4",
        "--dp-size 1",
        "--ep-size 4",
        "--mem-fraction-static 0.5",
        "--watchdog-timeout 1800",
    } <= set(arguments("deepseek-v4-flash", "sglang", hardware="mi355x"))


def test_deepseek_on_h100_means_verls_layout_string_and_vllms_arguments() -> None:
    layout = '--pipeline-model-parallel-layout "Et*6|t*6|t*6|t*5|t*5|t*5|t*5|t*5L"'
    assert layout in arguments("deepseek-v4-flash", "megatron", hardware="h100")
    vllm = arguments("deepseek-v4-flash", "vllm", hardware="h100")
    assert {"--data-parallel-size 4", "--enable-expert-parallel", "--kv-cache-dtype fp8", "--max-num-seqs 1"} <= set(
        vllm
    )
    verl = arguments("deepseek-v4-flash", "verl", hardware="h100")
    assert "trainer.nnodes=8" in verl
    # verl's workers read the engine's switch; the actor's own, which is accepted, has no effect
    assert "actor_rollout_ref.actor.megatron.router_replay.mode=R3" in verl
    assert arguments("deepseek-v4-flash", "sglang", hardware="h100") == []


def test_an_engine_of_its_own_devices_leaves_the_trainer_the_others() -> None:
    apart = load_recipe(
        "deepseek-v4-flash",
        ["cluster.colocated=false", "cluster.rollout_gpus=16"],
        hardware="mi355x",
        nodes=6,
    )
    texts = {argument.text for argument in effective(apart.config).arguments}
    assert {"--actor-num-nodes 4", "--rollout-num-gpus 16"} <= texts
    assert "--colocate" not in texts


def test_one_setting_that_decides_two_arguments_says_one_thing() -> None:
    qwen = arguments("qwen3-30b-a3b", "miles")
    assert [text for text in qwen if "advantage-estimator" in text] == ["--advantage-estimator gspo"]
    assert "--use-tis" in qwen
    deepseek = arguments("deepseek-v4-flash", "miles")
    assert not any(text.startswith(("--use-tis", "--tis-clip")) for text in deepseek)


def test_a_section_that_is_misspelt_or_in_the_wrong_place_names_the_right_key() -> None:
    """Fault D4, for the sections of the cluster."""
    for wrong, right in (
        ("cluster.node=2", "cluster.nodes"),
        ("trainer.layout.etpp=2", "trainer.layout.etp"),
        ("trainer.megatron.recompute_layers=1", "trainer.megatron.recompute_num_layers"),
        ("rollout.layout.memory_fracton=0.5", "rollout.layout.memory_fraction"),
    ):
        with pytest.raises(ConfigError) as refused:
            load_recipe("deepseek-v4-flash", [wrong])
        assert right in str(refused.value)


def test_deterministic_mode_refuses_a_variable_without_a_fixed_order_of_sums() -> None:
    fixed = load_recipe("deepseek-v4-flash", variants=["deterministic"]).config
    assert determinism_findings(fixed) == []
    wrong = ["environment.trainer.NCCL_ALGO='Ring,Tree'", "environment.trainer.CUBLAS_WORKSPACE_CONFIG=':0:0'"]
    found = determinism_findings(load_recipe("deepseek-v4-flash", wrong, variants=["deterministic"]).config)
    assert [finding.repair for finding in found] == [
        "environment.trainer.NCCL_ALGO → Ring",
        "environment.trainer.CUBLAS_WORKSPACE_CONFIG → :4096:8",
    ]
    assert determinism_findings(load_recipe("deepseek-v4-flash", wrong).config) == []


def test_sections_of_the_cluster_are_all_looked_at() -> None:
    held = {dotted(k.path) for k in all_keys() if not k.is_leaf and sections(k.field.annotation)}
    assert {prefix.rstrip(".") for prefix in CLUSTER_SECTIONS} <= held
    assert len(CLUSTER_KEYS) > 55
