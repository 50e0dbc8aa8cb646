"""``lockstep refit check``: it passes for a healthy engine and names the module that a planted fault spoils."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.cli import app
from lockstep.config.schema import PathModel, RandomModel
from lockstep.driver.refit_commands import named_model
from lockstep.model.load import ModelError, load_model
from lockstep.model.tiny import tiny_names, tiny_source
from lockstep.records import Claim
from lockstep.refit.check import as_text, check_refit
from lockstep.refit.names import families
from lockstep.rollout.receiver import TorchReceiver


def tiny(name: str) -> RandomModel:
    source = tiny_source(name)
    assert source is not None
    return source


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        app(["refit", "check", *arguments], standalone_mode=True)
    assert isinstance(done.value.code, int)
    return done.value.code, capsys.readouterr().out


@pytest.mark.parametrize("name", tiny_names())
def test_the_embedded_engine_passes_for_every_architecture(name: str) -> None:
    result = check_refit(tiny(name), "torch", name=name)
    assert result.ok, as_text(result)
    assert [one.weights for one in result.rounds] == ["other", "model's"]
    for one in result.rounds:
        assert {claim.name: claim.status for claim in one.claims} == {
            "covered": "held",
            "transported": "not checked",
            "loaded": "held",
            "derived": "not checked",
            "behaves": "held",
            "disk": "held",
        }
        assert one.measured is not None
        assert one.measured.power is not None
        assert one.measured.power > 0.1
    assert result.first is None
    assert "every claim held, twice" in as_text(result)


def test_in_bfloat16_the_bound_fits_the_power_of_a_tiny_model() -> None:
    """Its log-probs hardly depend on its weights: a bound of 0.1 is one that a stale engine would pass."""
    result = check_refit(tiny("tiny-qwen3-moe"), "torch", dtype="bfloat16")
    assert result.ok, as_text(result)
    measured = result.rounds[1].measured
    assert measured is not None
    assert measured.power is not None
    assert max(measured.prefill_mean, measured.decode_mean) <= measured.power / 10 < 0.1


@pytest.mark.slow
def test_a_model_that_transformers_cannot_compute_is_reported_and_no_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """DeepSeek-V4 in bfloat16: loaded from disk it has norms in float32 before linears in bfloat16."""
    code, text = command(capsys, "tiny-deepseek-v4", "--dtype", "bfloat16")
    assert code == 1
    assert "can't score at all" in text
    assert "NOT PROVED. Nothing was found wrong in what could be looked at" in text


@pytest.mark.slow
def test_a_trained_model_passes_although_its_rounding_is_coarser_than_a_random_ones() -> None:
    """Thirty layers, random tokens of log-prob −16: transformers' own float32 forward is 8e-6 from the exact sum."""
    result = check_refit(named_model("quickstart"), "torch", name="quickstart")
    assert result.ok, as_text(result)
    for one in result.rounds:
        assert one.measured is not None
        assert one.measured.power is not None
        assert one.measured.power > 1


def test_an_engine_that_equals_its_twin_from_disk_only_to_the_trainers_bound_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two programs may differ by rounding, one program hardly: what is between the two bounds is a fault."""
    original = TorchReceiver.receive

    def receive(self: TorchReceiver, tensors: Any) -> None:
        original(self, tensors)
        for name, tensor in self.live():
            if name == "model.norm.weight":
                tensor.mul_(1 + 1e-4)

    monkeypatch.setattr(TorchReceiver, "receive", receive)
    monkeypatch.setattr("lockstep.refit.transaction.claim_loaded", lambda *_: Claim("loaded", "held", "not looked at"))
    result = check_refit(tiny("tiny-qwen3"), "torch")
    claims = {claim.name: claim for claim in result.rounds[1].claims}
    assert claims["behaves"].status == "held", claims["behaves"].detail
    assert claims["disk"].status == "failed", claims["disk"].detail
    measured = result.rounds[1].measured
    assert measured is not None
    assert min(measured.prefill_mean, measured.decode_mean) > 1e-5
    assert not result.ok


def test_a_folder_that_transformers_cannot_compute_is_bad_usage(tmp_path: Path) -> None:
    model = load_model(tiny("tiny-deepseek-v4"), torch.float32)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="fails in bfloat16: expected m1 and m2"):
        check_refit(PathModel(path=str(tmp_path)), "torch", dtype="bfloat16")


def test_a_plain_push_without_a_manifest_is_found_by_the_first_module_that_kept_its_weights() -> None:
    """The public fault: names that the engine's loader does not know are ignored with success."""
    result = check_refit(tiny("tiny-qwen3-moe"), "torch", plain_push=True)
    assert not result.ok
    assert result.first is not None
    assert result.first.module == "model.layers.0.mlp.experts"
    for one in result.rounds:
        claims = {claim.name: claim for claim in one.claims}
        assert claims["behaves"].status == claims["disk"].status == claims["loaded"].status == "failed"
        assert "experts" in claims["loaded"].detail
        assert claims["covered"].status == "not checked"
    assert "First module whose output differs: model.layers.0.mlp.experts" in as_text(result)


def test_a_loader_that_refuses_a_plain_push_is_reported_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM's of DeepSeek-V3 does: KeyError, of a fused stack's name."""

    def refuses(self: torch.nn.Module, tensors: Any, strict: bool = True) -> None:
        raise KeyError("layers.1.mlp.experts.gate_up_proj")

    monkeypatch.setattr(torch.nn.Module, "load_state_dict", refuses)
    code, out = command(capsys, "tiny-deepseek-v3", "--plain-push")
    assert code == 1
    assert out.count("the engine's own loader refuses these names: KeyError: 'layers.1.mlp.experts.gate_up_proj'") == 2
    assert "REFUSED. See why above" in out


def test_a_dense_model_survives_a_plain_push() -> None:
    """Its names are the same on both sides: the fault is in the names, and the check does not cry wolf."""
    result = check_refit(tiny("tiny-qwen3"), "torch", plain_push=True)
    assert result.ok, as_text(result)


def test_a_tensor_that_is_forgotten_is_found_at_the_second_refit(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = "model.layers.1.self_attn.o_proj.weight"
    original = TorchReceiver.receive
    calls = 0

    def receive(self: TorchReceiver, tensors: Any) -> None:
        nonlocal calls
        calls += 1
        old = {name: tensor.clone() for name, tensor in self.live() if name == forgotten and calls == 2}
        original(self, ((name, old.get(name, tensor)) for name, tensor in tensors))

    monkeypatch.setattr(TorchReceiver, "receive", receive)
    result = check_refit(tiny("tiny-llama"), "torch")
    assert result.rounds[0].ok
    assert not result.rounds[1].ok
    assert result.first is not None
    assert result.first.module == "model.layers.1.self_attn.o_proj"


def test_a_refit_that_is_refused_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(self: TorchReceiver, manifest: object) -> None:
        raise ValueError("this engine takes nothing")

    monkeypatch.setattr(TorchReceiver, "begin", begin)
    result = check_refit(tiny("tiny-llama"), "torch")
    assert not result.ok
    assert "this engine takes nothing" in as_text(result)


def test_the_command_prints_a_table_or_json_and_exits_by_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = command(capsys, "tiny-llama")
    assert code == 0
    assert "behaves" in out
    assert "every claim held" in out
    code, out = command(capsys, "tiny-qwen3-moe", "--json", "--plain-push")
    assert code == 1
    told = json.loads(out)
    assert told["ok"] is False
    assert told["rounds"][0]["first"]["module"] == "model.layers.0.mlp.experts"
    assert told["rounds"][0]["measured"]["coverage"] >= 0.95


def test_a_model_is_a_folder_a_recipe_or_a_tiny_name(tmp_path: Path) -> None:
    from lockstep.config.errors import ConfigError

    assert named_model(str(tmp_path)).source == "path"
    assert named_model("quickstart").source == "gguf"
    assert named_model("tiny-glm4-moe").source == "random"
    with pytest.raises(ConfigError, match="tiny-deepseek-v3"):
        named_model("tiny-mamba")


def test_a_folder_that_transformers_saved_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lockstep.model.load import load_model

    load_model(tiny("tiny-glm4-moe"), torch.float32).save_pretrained(tmp_path / "model")
    code, out = command(capsys, str(tmp_path / "model"))
    assert code == 0, out


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
WITHOUT_TABLE = {
    "gpt2": {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "mixtral": {**SIZES, "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4},
}


def model_without_table(model_type: str, folder: Path) -> PathModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    assert model_type not in families()
    config = AutoConfig.for_model(model_type, **WITHOUT_TABLE[model_type])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return PathModel(path=str(folder))


@pytest.mark.parametrize("model_type", WITHOUT_TABLE)
def test_a_family_without_a_table_of_names_is_checked_in_an_engine_that_needs_none(
    model_type: str, tmp_path: Path
) -> None:
    result = check_refit(model_without_table(model_type, tmp_path), "torch")
    assert result.ok, as_text(result)


def test_a_family_without_a_table_is_refused_by_name_where_an_engine_reads_published_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchReceiver, "naming", "checkpoint")
    shown = as_text(check_refit(model_without_table("gpt2", tmp_path), "torch"))
    assert "names can't be translated to the engine's: no name table for 'gpt2'" in shown
    assert "REFUSED. See why above" in shown


def test_the_check_imports_no_trainer() -> None:
    program = "import sys, lockstep.refit.check; print([m for m in sys.modules if m.startswith('lockstep.train')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
