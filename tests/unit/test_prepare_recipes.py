"""What the shipped recipes prepare: each pruned copy from the published folder, at full size and byte by byte.

At full size a source is its configuration and its headers: sparse files of zeros, whose names and shapes come from the
hand-written layouts of ``synthetic_checkpoints``. Everything is planned and validated on them that is planned on the
real ones. The byte stages run on small models, by recipes that extend the shipped ones without the catalogue's sizes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lockstep.checkpoint.inspect import inspect
from lockstep.checkpoint.tensors import DTYPE_WORDS
from lockstep.cli import app
from lockstep.config.errors import ConfigError
from lockstep.recipes import load_recipe, recipe_names
from lockstep.topology.catalogue import model_shape
from lockstep.topology.parameters import count_parameters
from tests.synthetic_checkpoints import FAMILIES, Maker, write_checkpoint
from tests.unit.test_checkpoint_inspect_config import GLM_5_2, INKLING_SMALL, QWEN3_30B, V4_FLASH

PRUNED = {
    "deepseek-v4-flash-4layer": ("deepseek-v4-flash", 4),
    "glm-5_2-5layer": ("glm-5_2", 5),
    "inkling-small-4layer": ("inkling-small", 4),
    "qwen3-30b-a3b-5layer": ("qwen3-30b-a3b", 5),
}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v4-flash": ("deepseek_v4_flash", V4_FLASH),
    "glm-5_2": ("glm_moe_dsa", GLM_5_2),
    "inkling-small": ("inkling", INKLING_SMALL["text_config"] | {"moe_intermediate_size": 2048}),
    "qwen3-30b-a3b": ("qwen3_moe", QWEN3_30B),
}


class Sizes(Maker):
    """Names, shapes and dtypes alone."""

    def __init__(self) -> None:
        super().__init__(0)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    def fp8(self, module: str, rows: int, columns: int, scale_suffix: str, scale_dtype: torch.dtype) -> None:
        self.tensors[f"{module}.weight"] = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device="meta")
        shape = math.ceil(rows / 128), math.ceil(columns / 128)
        self.tensors[f"{module}.{scale_suffix}"] = torch.empty(shape, dtype=scale_dtype, device="meta")

    def fp4(self, module: str, rows: int, columns: int) -> None:
        self.tensors[f"{module}.weight"] = torch.empty(rows, columns // 2, dtype=torch.int8, device="meta")
        shape = rows, columns // 32
        self.tensors[f"{module}.scale"] = torch.empty(shape, dtype=torch.float8_e8m0fnu, device="meta")


def write_sparse(folder: Path, model: str, num_files: int = 8) -> Path:
    """A published checkpoint of full size whose files are holes behind their headers."""
    family, published = PUBLISHED[model]
    make = Sizes()
    config = FAMILIES[family](make, **published)
    if family == "inkling":  # whose MTP layers may be absent as a whole
        config["mtp_config"] |= {"num_nextn_predict_layers": 0, "local_layer_ids": []}
        make.tensors = {name: tensor for name, tensor in make.tensors.items() if ".mtp." not in name}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names, weight_map = list(make.tensors), {}
    for number in range(num_files):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name in names[number * len(names) // num_files : (number + 1) * len(names) // num_files]:
            tensor = make.tensors[name]
            end = position + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": DTYPE_WORDS[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [position, end],
            }
            position = end
            weight_map[name] = f"model-{number:05d}.safetensors"
        text = json.dumps(header).encode()
        with (folder / f"model-{number:05d}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + position)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def prepared(*arguments: str) -> dict[str, Any]:
    """The result of ``lockstep prepare``."""
    done = CliRunner().invoke(app, ["prepare", *arguments, "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def statuses(result: dict[str, Any]) -> dict[str, str]:
    return {stage["stage"]: stage["status"] for stage in result["stages"]}


def test_every_pruned_recipe_says_what_it_is_made_of() -> None:
    assert {name for name in recipe_names() if name.endswith("layer")} == PRUNED.keys()
    for name, (whole, num_layers) in PRUNED.items():
        pruned, published = load_recipe(name).config, load_recipe(whole).config
        assert pruned.prepare.keep_layers == num_layers
        assert pruned.prepare.source is not None
        assert published.prepare.keep_layers is None
        assert published.model.source == "path"
        assert pruned.prepare.source.rsplit("/", 1)[1].rstrip("}") == Path(published.model.path).name


def test_none_is_a_format_and_not_the_absence_of_one() -> None:
    """Read as no value, it would be the recipe's fp8."""
    resolved = load_recipe("deepseek-v4-flash", ["prepare.quantisation=none"])
    assert resolved.config.prepare.quantisation == "none"
    with pytest.raises(ConfigError, match=r"prepare\.quantisation = .fp4"):
        load_recipe("deepseek-v4-flash", ["prepare.quantisation=fp4"])


def test_the_engines_format_follows_the_overlay_and_may_not_contradict_it() -> None:
    with pytest.raises(ConfigError, match=r"(?s)prepare\.quantisation = .fp8.*refits bring mxfp4_experts"):
        load_recipe("deepseek-v4-flash", ["prepare.quantisation=fp8"], hardware="h100")


@pytest.mark.parametrize(("name", "hardware", "stages", "engine"), [
    ("qwen3-30b-a3b-5layer", "h200", ("planned", "not needed", "not needed"), 2.0),
    pytest.param("inkling-small-4layer", "h200", ("planned", "not needed", "not needed"), 2.0, marks=pytest.mark.slow),
    pytest.param("glm-5_2-5layer", "h200", ("planned", "not needed", "not needed"), 2.0, marks=pytest.mark.slow),
    pytest.param("glm-5_2", "gb300", ("not needed", "not needed", "planned"), 1.01, marks=pytest.mark.slow),
    pytest.param("deepseek-v4-flash-4layer", "h200", ("planned", "planned", "planned"), 1.04, marks=pytest.mark.slow),
    pytest.param("deepseek-v4-flash", "mi355x", ("not needed", "planned", "planned"), 1.01, marks=pytest.mark.slow),
    pytest.param("deepseek-v4-flash", "h100", ("not needed", "planned", "not needed"), 0.56, marks=pytest.mark.slow),
])  # fmt: skip
def test_shipped_recipes_plan_the_published_checkpoint_at_its_full_size(
    name: str, hardware: str, stages: tuple[str, ...], engine: float, tmp_path: Path
) -> None:
    """``engine``: bytes a parameter of the engine's folder."""
    source = write_sparse(tmp_path / "source", PRUNED.get(name, (name, 0))[0])
    target = tmp_path / "target"
    result = prepared(name, "--hardware", hardware, "--source", str(source), "--target", str(target), "--dry-run")
    found = statuses(result)
    assert tuple(found[stage] for stage in ("prune", "dequantise", "quantise")) == stages
    sizes = {stage["folder"]: stage["num_bytes"] for stage in result["stages"]}
    counts = count_parameters(model_shape(name))
    assert sizes[result["engine"]] / counts.total == pytest.approx(engine, rel=0.03)
    if name in PRUNED:  # without MTP layers; what stays in float32 and hash-routed ids are a little more
        assert sizes[result["trainer"]] / counts.total == pytest.approx(2, rel=0.01)
    assert not target.exists()


@pytest.mark.parametrize(("name", "hardware", "family", "engine"), [
    ("qwen3-30b-a3b-5layer", "h200", "qwen3_moe", ("pruned", "none")),
    ("inkling-small-4layer", "h200", "inkling", ("pruned", "none")),
    ("glm-5_2-5layer", "h200", "glm_moe_dsa", ("pruned", "none")),
    ("glm-5_2-5layer", "h200", "glm_moe_dsa_fp8", ("plain", "none")),
    ("deepseek-v4-flash-4layer", "h200", "deepseek_v4_flash", ("quantised", "fp8")),
    ("deepseek-v4-flash-4layer", "mi355x", "deepseek_v4_fp8", ("pruned", "fp8")),
])  # fmt: skip
def test_the_stages_of_shipped_recipes_run_on_small_models_of_their_families(
    name: str, hardware: str, family: str, engine: tuple[str, str], tmp_path: Path
) -> None:
    source, recipe = write_checkpoint(tmp_path / "source", family), tmp_path / "small.toml"
    recipe.write_text(f'extends = "{name}"\nunset = ["model.catalogue"]\n')
    arguments = (str(recipe), "--hardware", hardware, "--source", str(source), "--target", str(tmp_path / "t"))
    result = prepared(*arguments)
    assert set(statuses(result).values()) == {"done", "not needed"}
    reports = {end: inspect(Path(result[end])) for end in ("trainer", "engine")}
    for report in reports.values():
        assert report.ok, report.text()
        assert report.facts["num_layers"] == PRUNED[name][1]
    assert reports["trainer"].quantisation == "none"
    assert (Path(result["engine"]).name, reports["engine"].quantisation) == engine
