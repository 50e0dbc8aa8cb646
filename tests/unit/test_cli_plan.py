"""``lockstep plan`` and ``lockstep recipes`` as a user sees them: exit codes, text, JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.driver.plan_commands import make_plan
from lockstep.recipes import load_recipe


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the entry point in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["lockstep", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def test_a_recipe_that_keeps_every_rule_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "plan", "deepseek-v4-flash", "--hardware", "h200") == 0
    text = capsys.readouterr().out
    assert text.startswith("deepseek-v4-flash: deepseek-v4-flash on 8 nodes × 8 h200\n")
    assert "  evidence: miles" in text
    assert "--pipeline-model-parallel-size 8" in text
    assert "refuses trainer.backend: Lockstep does not run the megatron trainer yet" in text
    assert text.rstrip().endswith("passes")


def test_every_violation_is_told_with_its_repair_and_fails_the_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ("--set", "trainer.layout.ep=5", "--set", "trainer.layout.first_stage_layers=12")
    assert run(monkeypatch, "plan", "deepseek-v4-flash", *changes, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["passes"] is False
    rules = {one["rule"]: one for one in found["rules"] if one["severity"] == "error"}
    assert {"expert-grid", "experts-ep"} <= rules.keys()
    assert len(rules) >= 3  # the uneven pipeline too
    assert rules["expert-grid"]["repair"].startswith("ep 5 → 4")
    assert all(one["source"] for one in rules.values())


def test_a_plan_that_does_not_fit_says_which_phase_and_what_would(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_the_card = ("--nodes", "12", "--set", "trainer.megatron.optimizer_offload_fraction=0.0")
    assert run(monkeypatch, "plan", "inkling", *on_the_card) == 1
    text = capsys.readouterr().out
    assert "error: memory-fits: train, stage" in text
    assert "optimizer_offload_fraction 0 → " in text
    assert "refused: 1 violation (memory-fits)" in text


def test_json_has_rules_memory_ledger_arguments_and_what_train_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "plan", "quickstart", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {"rules", "memory", "environment", "arguments", "unmapped", "refused_by_train", "layout"} <= found.keys()
    assert [phase["phase"] for phase in found["memory"]["phases"]] == ["generate", "score", "train", "refit", "save"]
    assert all(
        item["basis"] in ("counted", "measured", "assumed") for p in found["memory"]["phases"] for item in p["items"]
    )
    assert found["refused_by_train"] == []
    assert found["layout"]["needs_evidence"] is False


def test_suggestions_are_legal_layouts_of_the_same_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("plan", "qwen3-30b-a3b", "--hardware", "h200", "--nodes", "2", "--suggest", "--json")
    run(monkeypatch, *arguments)
    found = json.loads(capsys.readouterr().out)["suggestions"]
    assert found
    for one in found:
        layout = one["layout"]
        assert 8 % (layout["tp"] * layout["pp"] * layout["cp"]) == 0  # 2 nodes × 4 devices
        assert one["fits"] in (0, 1, 2)
    run(monkeypatch, *arguments[:-1])
    assert "suggestions, the planner's best first:" in capsys.readouterr().out


def test_sources_name_where_each_argument_is_defined(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "plan", "deepseek-v4-flash", "--sources")
    (line,) = (one for one in capsys.readouterr().out.splitlines() if "--tensor-model-parallel-size" in one)
    assert "# trainer.layout.tp; NVIDIA/Megatron-LM megatron/core/model_parallel_config.py" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"],
        ["plan", "quickstart", "--from", __file__],
        ["plan", "--from", __file__, "--suggest"],
        ["plan", "--from", __file__, "--compare", "quickstart"],
        ["plan", "quickstart", "--compare", "glm-5_2", "--suggest"],
        ["plan", "quickstart", "--compare", "no-such-recipe"],
        ["plan", "quickstart", "--set-variable", "A=1"],
        ["plan", "no-such-recipe"],
        ["plan", "deepseek-v4-flash", "--hardware", "h300"],
        ["plan", "deepseek-v4-flash", "--variant", "fp7"],
        ["recipes", "diff", "quickstart"],
        ["recipes", "diff", "deepseek-v4-flash", "--hardware", "mi355x", "b200"],
        ["recipes", "diff", "deepseek-v4-flash", "glm-5_2", "--variant", "fp8"],
        ["train", "deepseek-v4-flash"],
    ],
)
def test_bad_usage_exits_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert capsys.readouterr().err.strip()


def test_the_difference_between_two_kinds_of_hardware_has_values_and_reasons(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "recipes", "diff", "deepseek-v4-flash", "--hardware", "mi355x", "h200") == 0
    text = capsys.readouterr().out
    assert "trainer.layout.tp\n  mi355x: 4  (one engine's devices)\n  h200: 8  (a node's devices)\n" in text
    assert "algorithm" not in text
    assert run(monkeypatch, "recipes", "diff", "deepseek-v4-flash", "--hardware", "h200", "gb300", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trainer.layout.cp"]["gb300"]["value"] == 2


def test_a_recipe_is_shown_with_its_overlay_and_the_reasons(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "recipes", "show", "deepseek-v4-flash", "--hardware", "h200", "--variant", "fp8") == 0
    text = capsys.readouterr().out
    assert "pp = 8  # overlay h200: the nodes" in text
    assert 'fp8 = "blockwise"  # variant fp8: ' in text
    again = tmp_path / "config.toml"
    again.write_text(text)
    resolved = load_recipe("deepseek-v4-flash", hardware="h200", variants=["fp8"])
    assert load_recipe(str(again)).config == resolved.config


def test_unverified_is_an_origin_of_the_resolved_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "recipes", "show", "qwen3-4b", "--hardware", "h100", "--unverified") == 0
    assert "unverified = true  # --unverified" in capsys.readouterr().out


def test_a_layout_of_ones_own_is_judged_and_not_refused_for_being_unlisted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = ("--hardware", "h200", "--set", "trainer.layout.pp=4", "--set", "trainer.layout.first_stage_layers=11")
    mine = (*mine, "--set", "trainer.layout.last_stage_layers=10")
    assert run(monkeypatch, "plan", "deepseek-v4-flash", *mine) == 0
    assert "evidence: none: `train` asks for --unverified" in capsys.readouterr().out


def test_hardware_without_an_overlay_is_told_in_text_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base layout (tp 1 on one node) looked as if somebody had chosen it for this hardware."""
    run(monkeypatch, "plan", "deepseek-v4-flash", "--hardware", "b200")
    text = capsys.readouterr().out
    assert "rules:\n  warning: no-overlay: deepseek-v4-flash has no overlay for b200: what follows is" in text
    assert (
        "repair: name one of gb300, h100, h200, mi355x, set a layout, or take one of `lockstep plan --suggest`" in text
    )
    run(monkeypatch, "plan", "deepseek-v4-flash", "--hardware", "b200", "--json")
    (found,) = [one for one in json.loads(capsys.readouterr().out)["rules"] if one["rule"] == "no-overlay"]
    assert found["severity"] == "warning"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("deepseek-v4-flash", "--hardware", "h200"), {}),
        (("deepseek-v4-flash",), {}),
        (("quickstart", "--hardware", "h200"), {}),  # for any device
        (("qwen3-4b", "--hardware", "h100"), {"no-overlay": "note"}),  # as it stands it is for one device
        (("deepseek-v4-flash", "--hardware", "b200", "--set", "trainer.layout.tp=8"), {"no-overlay": "note"}),
        (("deepseek-v4-flash", "--hardware", "h200", "--nodes", "4"), {"overlay-nodes": "warning"}),
        (("inkling", "--nodes", "12"), {}),  # an overlay of its own
    ],
)
def test_only_sizes_that_nobody_chose_for_the_hardware_are_told(
    arguments: tuple[str, ...],
    told: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(monkeypatch, "plan", *arguments, "--json")
    rules = json.loads(capsys.readouterr().out)["rules"]
    assert {one["rule"]: one["severity"] for one in rules if "overlay" in one["rule"]} == told


def test_a_variable_that_contradicts_another_fails_a_strict_recipe() -> None:
    wrong = [
        "environment.engine.SGLANG_HACK_FLASHMLA_BACKEND=triton",
        "environment.engine.SGLANG_OPT_USE_JIT_NORM='true'",
    ]
    made = make_plan(load_recipe("deepseek-v4-flash", wrong), {})
    assert [finding.rule for finding in made.errors] == ["variable-contradicted"]


def test_two_plans_are_compared_by_settings_reasons_and_items(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What tells the two public settings of 32 MI355X apart: no command showed it."""
    arguments = ("plan", "deepseek-v4-flash", "--hardware", "mi355x", "--compare", "parity")
    assert run(monkeypatch, *arguments) == 0
    text = capsys.readouterr().out
    assert "  rollout.layout.memory_fraction\n    deepseek-v4-flash: 0.5  (" in text
    assert "    parity: 0.7  (" in text
    assert "memory, deepseek-v4-flash → parity:\n  generate (shared): " in text
    assert "      engine key/value cache: " in text
    # Why: the offload of the optimizer's states, which both have, makes the smaller fraction possible.
    assert "what fits:\n  deepseek-v4-flash: 0.5 of " in text
    assert "  so 0.5 is there for deepseek-v4-flash because of the offload: without it 0.56 is the least" in text
    assert "  so 0.5 fits parity too: nothing that is counted asks for 0.7" in text
    assert run(monkeypatch, *arguments, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["trainer.layout.tp"]["parity"]["value"] == 8
    assert any("it frees 82.8 GB" in line for line in found["what_fits"])
    caches = {
        name: next(phase["items"]["engine key/value cache"] for phase in one["phases"] if phase["phase"] == "generate")
        for name, one in found["plans"].items()
    }
    assert caches["parity"] > 2 * caches["deepseek-v4-flash"] > 0


def test_a_comparison_takes_a_file_too_and_fails_where_one_side_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "deepseek-v4-flash"\n[trainer.layout]\nep = 5\n')
    assert run(monkeypatch, "plan", "deepseek-v4-flash", "--compare", str(mine)) == 1
    text = capsys.readouterr().out
    assert f"{mine}: refused: 2 violations (expert-grid, experts-ep)" in text
    assert "deepseek-v4-flash: passes" in text
    mine.write_text('extends = "deepseek-v4-flash"\n[rollout]\nmax_new_tokens = 2048\n')
    assert run(monkeypatch, "plan", str(mine), "--compare", "fp8", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["settings"]) == {
        "trainer.megatron.fp8",
        "environment.trainer.NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
    }


def test_a_launch_script_is_judged_through_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 \\\n"
        "  --pipeline-model-parallel-size 2 \\\n"
        "  --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --num-experts 64 --num-layers 4 \\\n"
        "  --hidden-size 1024 --num-attention-heads 16 --sequence-parallel --seq-length 1024 --micro-batch-size 1 \\\n"
        "  --max-position-embeddings 1024 --global-batch-size 8 --bf16\n"
    )
    assert run(monkeypatch, "plan", "--from", str(script)) == 1
    assert "expert-grid" in capsys.readouterr().out


def test_secrets_of_a_recipe_are_masked_in_the_data_of_its_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job's own copy of the variables, and the repair that changes them, were printed as they stand."""
    changes = ("--set", "environment.trainer.HF_TOKEN=hf_abcdefghijk", "--hardware", "h200")
    without = ("--set", "environment.trainer.CUDA_DEVICE_MAX_CONNECTIONS=8")
    for arguments in (("plan", "deepseek-v4-flash", "--json"), ("plan", "deepseek-v4-flash"), ("recipes", "show")):
        named = arguments if arguments[0] == "plan" else (*arguments, "deepseek-v4-flash")
        run(monkeypatch, *named, *changes, *(without if named[0] == "plan" else ()))
        printed = capsys.readouterr().out
        assert "hf_abcdefghijk" not in printed
        assert "HF_TOKEN" in printed
