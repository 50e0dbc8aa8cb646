"""Quantising and dequantising a checkpoint: the refit's bytes, decoded by loops that know nothing of ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lockstep.checkpoint.convert import Dequantise, Quantise
from lockstep.checkpoint.errors import CheckpointError
from lockstep.checkpoint.headers import read_checkpoint
from lockstep.checkpoint.pairs_on_disk import scheme_of
from lockstep.checkpoint.progress import Silent
from lockstep.checkpoint.records import CheckpointIndex, Transform
from lockstep.checkpoint.streaming import folder_jobs
from lockstep.checkpoint.tensors import TensorReader
from lockstep.checkpoint.work_list import WorkList
from lockstep.checkpoint.writer import run_jobs
from lockstep.records import Manifest, Quantisation, TensorSpec
from lockstep.refit.quantised import quantised
from lockstep.refit.quantised_names import form_of
from lockstep.refit.transports import whole_tensors
from tests.synthetic_checkpoints import make_checkpoint, write_checkpoint, write_files

PLAIN = ("llama", "llama_tied", "qwen3_moe", "glm_moe_dsa", "deepseek_v4_plain")
CASES: list[tuple[str, Quantisation]] = [
    *((family, scheme) for family in PLAIN for scheme in ("fp8", "fp8_ue8m0")),
    *((family, "mxfp4_experts") for family in ("qwen3_moe", "glm_moe_dsa", "deepseek_v4_plain")),
]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def run(transform: Transform, source: Path, target: Path, file_bytes: int = 200_000) -> Path:
    """The folder that a transform makes."""
    index = read_checkpoint(source)
    target.mkdir()
    work = WorkList(target)
    work.begin("stage", {})
    with TensorReader(index) as reader:
        jobs = folder_jobs(transform, index, reader, reader.files, file_bytes)
        run_jobs(target / "out", "stage", jobs, work, workers=2, progress=Silent())
    return target / "out"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, by safetensors' own reader."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Source:
    """Tensors in checkpoint names as the trainer's weights."""

    def __init__(self, model_type: str, tensors: dict[str, torch.Tensor]) -> None:
        self.model_type, self.tensors = model_type, tensors

    def manifest(self) -> Manifest:
        specs = tuple(
            TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), name)
            for name, t in self.tensors.items()
        )
        return Manifest(1, specs, model_type=self.model_type, naming="checkpoint")

    def shards(self) -> Any:
        for name, tensor in self.tensors.items():
            yield name, tuple(tensor.shape), (0,) * tensor.ndim, tensor


@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_a_prepared_folder_has_the_bytes_that_a_refit_sends(family: str, scheme: Quantisation, tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 4} if family == "glm_moe_dsa" else {}
    config, tensors = make_checkpoint(family, **layers)
    made = tensors_of(run(Quantise(scheme), write_files(tmp_path / "in", config, tensors), tmp_path / "t"))
    sent = dict(whole_tensors(quantised(Source(config["model_type"], tensors), scheme)))
    assert made.keys() == sent.keys()
    assert len(sent) > len(tensors)
    for name, tensor in sent.items():
        assert raw(made[name]) == raw(tensor), name
        assert made[name].dtype == (torch.int8 if family.startswith("deepseek") else tensor.dtype) or (
            tensor.dtype != torch.uint8 and made[name].dtype == tensor.dtype
        )


def decoded(codes: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    """A quantised weight in float64 by loops over its blocks, from bits."""
    bits = codes.view(torch.uint8).numpy()
    if scale.dtype == torch.float8_e8m0fnu:
        scales = 2.0 ** (scale.view(torch.uint8).numpy().astype(np.float64) - 127)
    else:
        scales = scale.double().numpy()
    if codes.dtype in (torch.int8, torch.uint8):
        nibbles = np.stack([bits & 15, bits >> 4], -1).reshape(*bits.shape[:-1], -1)
        values = np.where(nibbles & 8, -1, 1) * E2M1[nibbles & 7]
        return values * np.repeat(scales, 32, -1)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values = np.where(bits & 128, -magnitude, magnitude)
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            values[128 * r : 128 * (r + 1), 128 * c : 128 * (c + 1)] *= scales[r, c]
    return values


@pytest.mark.parametrize("family", ["glm_moe_dsa_fp8", "deepseek_v4_flash", "deepseek_v4_fp8"])
def test_dequantised_weights_are_code_times_scale_rounded_once(family: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "in", family)
    before = tensors_of(source)
    after = tensors_of(run(Dequantise(), source, tmp_path / "t"))
    num_pairs = 0
    for name, tensor in after.items():
        scale = next((before[n] for n in (name + "_scale_inv", name[:-7] + ".scale") if n in before), None)
        if scale is None:
            assert raw(tensor) == raw(before[name])
            continue
        num_pairs += 1
        assert tensor.dtype == torch.bfloat16
        # Products of an fp8 code and a float32 scale are rounded to float32 before bfloat16: at most at a tie apart.
        wanted = torch.from_numpy(decoded(before[name], scale)).float().bfloat16()
        assert torch.equal(tensor, wanted), name
    assert num_pairs == len(before) - len(after) > 10


@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_quantising_what_was_dequantised_gives_the_same_weights_again(
    family: str, scheme: Quantisation, tmp_path: Path
) -> None:
    once = run(Quantise(scheme), write_checkpoint(tmp_path / "in", family), tmp_path / "a")
    plain = run(Dequantise(), once, tmp_path / "b")
    assert scheme_of(read_checkpoint(plain)) == "none"
    twice = run(Quantise(scheme), plain, tmp_path / "c")
    again = run(Dequantise(), twice, tmp_path / "d")
    assert scheme_of(read_checkpoint(twice)) == scheme
    first, second = tensors_of(once), tensors_of(twice)
    same = [raw(first[name]) == raw(second[name]) for name in first]
    # A power of two scale may halve while its codes double, and bfloat16 rounds a float32 scale's products: the weights
    # are what has to stay.
    assert scheme == "mxfp4_experts" or sum(same) > 0.5 * len(same)
    last, back = tensors_of(again), tensors_of(plain)
    if scheme != "fp8":
        assert all(raw(last[name]) == raw(back[name]) for name in back)
    else:
        for name in back:
            assert torch.allclose(last[name].float(), back[name].float(), rtol=2**-3, atol=2.0**-9)


def broken(family: str, tmp_path: Path, change: Any) -> CheckpointIndex:
    config, tensors = make_checkpoint(family)
    change(config, tensors)
    return read_checkpoint(write_files(tmp_path / "broken", config, tensors))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("scheme", ["fp8", "fp8_ue8m0", "mxfp4_experts"])
def test_a_source_that_is_not_finite_is_refused_by_name_and_place(
    value: float, scheme: Quantisation, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"

    def spoil(_: Any, tensors: Any) -> None:
        tensors[name][5, 7] = value

    source = broken("qwen3_moe", tmp_path, spoil)
    with pytest.raises(CheckpointError, match=rf"{name}: 1 value.* first at \(5, 7\)"):
        run(Quantise(scheme), source.folder, tmp_path / "t")
    assert name not in tensors_of(tmp_path / "t" / "out")
    assert not (tmp_path / "t" / "out" / "config.json").exists()
    assert not WorkList(tmp_path / "t").is_complete("stage")


def test_an_all_zero_block_becomes_zeros_and_a_usable_scale(tmp_path: Path) -> None:
    def zero(_: Any, tensors: Any) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"].zero_()

    made = run(Quantise("fp8"), broken("llama", tmp_path, zero).folder, tmp_path / "a")
    tensors = tensors_of(made)
    assert bool((tensors["model.layers.0.mlp.down_proj.weight_scale_inv"] > 0).all())
    plain = tensors_of(run(Dequantise(), made, tmp_path / "b"))["model.layers.0.mlp.down_proj.weight"]
    assert not bool(plain.any())
    assert bool(torch.isfinite(plain).all())


def test_unknown_names_are_all_refused_at_once_and_never_passed_through(tmp_path: Path) -> None:
    """(C26: a fused or renamed projection fell through with a warning.)"""

    def rename(_: Any, tensors: Any) -> None:
        for layer in (0, 2):
            tensors[f"model.layers.{layer}.self_attn.qkv_proj.weight"] = tensors.pop(
                f"model.layers.{layer}.self_attn.q_proj.weight"
            )

    source = broken("llama", tmp_path, rename)
    with pytest.raises(CheckpointError) as refused:
        Quantise("fp8").outputs(source)
    assert len(refused.value.problems) == 2
    assert "model.layers.2.self_attn.qkv_proj.weight is unknown" in str(refused.value)


def test_a_family_without_a_quantised_form_and_a_scheme_without_experts_are_refused(tmp_path: Path) -> None:
    inkling = read_checkpoint(write_checkpoint(tmp_path / "i", "inkling"))
    with pytest.raises(CheckpointError, match="inkling_text has no quantised form"):
        Quantise("fp8").outputs(inkling)
    llama = read_checkpoint(write_checkpoint(tmp_path / "l", "llama"))
    with pytest.raises(CheckpointError, match="no experts"):
        Quantise("mxfp4_experts").outputs(llama)


def test_what_is_quantised_already_is_not_quantised_again(tmp_path: Path) -> None:
    source = read_checkpoint(write_checkpoint(tmp_path / "in", "deepseek_v4_flash"))
    for scheme in ("fp8", "mxfp4_experts"):
        with pytest.raises(CheckpointError, match=r"quantised already \(mxfp4_experts\)"):
            Quantise(scheme).outputs(source)
    with pytest.raises(CheckpointError, match="nothing to dequantise"):
        Dequantise().outputs(read_checkpoint(write_checkpoint(tmp_path / "p", "llama")))


def test_half_pairs_and_scales_of_a_wrong_shape_or_dtype_are_all_named(tmp_path: Path) -> None:
    at = "model.layers.0.self_attn."

    def spoil(_: Any, tensors: Any) -> None:
        del tensors[at + "q_a_proj.weight_scale_inv"]
        tensors[at + "kv_b_proj.weight"] = tensors[at + "kv_b_proj.weight"].float().bfloat16()
        tensors[at + "o_proj.weight_scale_inv"] = tensors[at + "o_proj.weight_scale_inv"].repeat(2, 1)
        tensors[at + "q_b_proj.weight_scale_inv"] = tensors[at + "q_b_proj.weight_scale_inv"].half()

    source = broken("glm_moe_dsa_fp8", tmp_path, spoil)
    with pytest.raises(CheckpointError) as refused:
        Dequantise().outputs(source)
    text = str(refused.value)
    assert "q_a_proj.weight is F8_E4M3 and has no" in text
    assert "kv_b_proj.weight_scale_inv has no quantised weight" in text
    assert "o_proj.weight_scale_inv has shape" in text
    assert "q_b_proj.weight_scale_inv is F16" in text


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("quant_method", "gptq", "quant_method gptq"),
        ("weight_block_size", [64, 64], r"weight_block_size \[64, 64\]"),
        ("activation_scheme", "static", "activation_scheme static"),
    ],
)
def test_formats_that_are_none_of_ours_are_refused(key: str, value: Any, why: str, tmp_path: Path) -> None:
    source = broken("glm_moe_dsa_fp8", tmp_path, lambda config, _: config["quantization_config"].update({key: value}))
    with pytest.raises(CheckpointError, match=why):
        Dequantise().outputs(source)


def test_codes_that_are_nan_are_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"

    def spoil(_: Any, tensors: Any) -> None:
        tensors[name].view(torch.uint8)[3, 3] = 0x7F

    source = broken("glm_moe_dsa_fp8", tmp_path, spoil)
    with pytest.raises(CheckpointError, match=f"{name}: 1 of .* codes are NaN"):
        run(Dequantise(), source.folder, tmp_path / "t")


def test_e4m3fnuz_codes_mean_half_and_are_converted_by_value(tmp_path: Path) -> None:
    config, tensors = make_checkpoint("glm_moe_dsa_fp8")
    plain = tensors_of(run(Dequantise(), write_files(tmp_path / "fn", config, tensors), tmp_path / "a"))
    for name, tensor in list(tensors.items()):
        if tensor.dtype == torch.float8_e4m3fn:
            bits = torch.where(tensor.view(torch.uint8) == 0x80, 0, tensor.view(torch.uint8)).to(torch.uint8)
            tensors[name] = bits.view(torch.float8_e4m3fnuz)
            tensors[name + "_scale_inv"] = 2 * tensors[name + "_scale_inv"]
    config["quantization_config"]["fmt"] = "e4m3fnuz"
    folder = write_files(tmp_path / "fnuz", config, tensors)
    converted = tensors_of(run(Dequantise(), folder, tmp_path / "b"))
    assert any(entry.dtype == "F8_E4M3FNUZ" for entry in read_checkpoint(folder).tensors.values())
    for name, tensor in plain.items():
        assert torch.equal(converted[name], tensor), name


def test_names_that_stay_high_precision_are_the_familys_and_those_that_are_asked_for(tmp_path: Path) -> None:
    source = read_checkpoint(write_checkpoint(tmp_path / "in", "qwen3_moe"))
    for extra, kept in (((), ()), ((r"\.self_attn\.", r"layers\.1\."), ("self_attn", "layers.1."))):
        groups = Quantise("fp8", extra).outputs(source)
        verbatim = {group.tensors[0].name for group in groups if group.tensors[0].verbatim}
        wanted = {
            name
            for name in source.tensors
            if form_of("qwen3_moe", "fp8", name) is None or any(part in name for part in kept)
        }
        assert verbatim == wanted
        listed = Quantise("fp8", extra).config(source)["quantization_config"]["modules_to_not_convert"]
        assert "lm_head" in listed
        assert "model.layers.0.mlp.gate" in listed
        assert ("model.layers.0.self_attn.q_proj" in listed) == bool(extra)


def test_a_configuration_that_cannot_name_what_stays_plain_refuses_further_names(tmp_path: Path) -> None:
    source = read_checkpoint(write_checkpoint(tmp_path / "s", "deepseek_v4_plain"))
    with pytest.raises(CheckpointError, match="configuration has no list of modules"):
        Quantise("fp8", (r"layers\.0\.attn\.wo_a",)).outputs(source)


def test_every_source_tensor_is_used_and_every_promise_is_kept(tmp_path: Path) -> None:
    """(C4: names without a counterpart were ignored, and experts stayed random.)"""
    for family, transform in (("qwen3_moe", Quantise("mxfp4_experts")), ("deepseek_v4_flash", Dequantise())):
        source = read_checkpoint(write_checkpoint(tmp_path / family, family))
        groups = transform.outputs(source)
        assert {name for group in groups for name in group.sources} == source.tensors.keys()
        made = read_checkpoint(run(transform, source.folder, tmp_path / f"{family}.t"))
        promised = {t.name: (t.dtype, t.shape) for group in groups for t in group.tensors}
        assert {entry.name: (entry.dtype, entry.shape) for entry in made.tensors.values()} == promised


def test_a_transform_that_breaks_its_promise_is_stopped(tmp_path: Path) -> None:
    class Broken(Quantise):
        def make(self, group: Any, read: Any) -> dict[str, torch.Tensor]:
            made = super().make(group, read)
            return {name: tensor[:1] for name, tensor in made.items()}

    with pytest.raises(CheckpointError, match="was promised"):
        run(Broken("fp8"), write_checkpoint(tmp_path / "in", "llama"), tmp_path / "t")


def test_a_mixture_that_is_no_scheme_is_refused(tmp_path: Path) -> None:
    source = read_checkpoint(write_checkpoint(tmp_path / "in", "deepseek_v4_flash"))
    scales = {n: replace(e, dtype="F32") for n, e in source.tensors.items() if e.dtype == "F8_E8M0" and ".attn." in n}
    mixed = CheckpointIndex(source.folder, source.config, {**source.tensors, **scales})
    with pytest.raises(CheckpointError, match="mixture"):
        scheme_of(mixed)
