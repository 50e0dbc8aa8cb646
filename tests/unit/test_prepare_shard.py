"""Shards for any number of ranks and back: the same bytes, by torch's own loader and by ours, whoever wrote them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lockstep.checkpoint.errors import CheckpointError
from lockstep.checkpoint.gather import ShardReader, gather_shards
from lockstep.checkpoint.headers import read_checkpoint
from lockstep.checkpoint.progress import Silent
from lockstep.checkpoint.shard import METADATA, ShardPlan, write_shards
from lockstep.checkpoint.tensors import TORCH_DTYPES, TensorReader
from lockstep.checkpoint.work_list import WorkList
from lockstep.train.checkpoint import TrainerStateError, load_tensors, save_tensors
from tests.synthetic_checkpoints import make_checkpoint, write_checkpoint, write_files

FAMILIES = ("llama_tied", "qwen3_moe", "glm_moe_dsa", "deepseek_v4_plain", "inkling")


def shard(source: Path, target: Path, ranks: int, workers: int = 2) -> tuple[Path, ShardPlan]:
    index = read_checkpoint(source)
    plan = ShardPlan.of(index, ranks)
    target.mkdir(exist_ok=True)
    work = WorkList(target)
    work.begin("shard", {})
    with TensorReader(index) as reader:
        write_shards(target / "shards", plan, reader, work, workers=workers, progress=Silent())
    return target / "shards", plan


def gather(shards: Path, config: dict[str, Any], target: Path) -> Path:
    """The folder of a distributed checkpoint."""
    return gather_shards(shards, config, target, file_bytes=300_000, workers=2, progress=Silent())


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*bits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_a_folder_through_shards_and_back_is_byte_equal(family: str, ranks: int, tmp_path: Path) -> None:
    """(C24: experts were missing or mixed when shards were exported on another layout.)"""
    config, tensors = make_checkpoint(family)
    shards, plan = shard(write_files(tmp_path / "in", config, tensors), tmp_path / "t", ranks)
    assert len(list(shards.glob("*.distcp"))) == ranks
    back = tensors_of(gather(shards, config, tmp_path / "u"))
    assert back.keys() == tensors.keys() - set(plan.left_out)
    assert len(back) > 25
    for name, tensor in back.items():
        assert same(tensor, tensors[name]), name


@pytest.mark.parametrize("family", ["qwen3_moe", "inkling"])
def test_torchs_own_loader_reads_them_and_any_writer_is_gathered(family: str, tmp_path: Path) -> None:
    config, tensors = make_checkpoint(family)
    shards, plan = shard(write_files(tmp_path / "in", config, tensors), tmp_path / "t", 3)
    loaded = {t.name: torch.zeros(t.shape, dtype=TORCH_DTYPES[t.dtype]) for t in plan.tensors}
    load_tensors(shards, loaded)
    stack = loaded["model.layers.2.mlp.experts.gate_up_proj"]
    if family == "qwen3_moe":
        parts = [tensors[f"model.layers.2.mlp.experts.3.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(stack[3], torch.cat(parts))
    else:
        woven = tensors["model.llm.layers.2.mlp.experts.w13_weight"]
        assert torch.equal(stack, torch.cat((woven[:, 0::2], woven[:, 1::2]), 1))
    save_tensors(tmp_path / "torch", loaded)  # by one rank, in torch's own layout
    back = tensors_of(gather(tmp_path / "torch", config, tmp_path / "u"))
    assert all(same(back[name], tensors[name]) for name in back)
    assert back.keys() == tensors.keys() - set(plan.left_out)


def test_layers_that_the_trainer_has_not_are_left_out_by_name(tmp_path: Path) -> None:
    for family, parts in (
        ("glm_moe_dsa", {"model.layers.7."}),
        ("deepseek_v4_plain", {"mtp.0."}),
        ("inkling", {"model.mtp.layers."}),
        ("qwen3_moe", set[str]()),
    ):
        plan = ShardPlan.of(read_checkpoint(write_checkpoint(tmp_path / family, family)), 2)
        assert bool(plan.left_out) == bool(parts)
        assert all(any(name.startswith(part) for part in parts) for name in plan.left_out)


def test_quantised_weights_and_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="dequantise the checkpoint first"):
        ShardPlan.of(read_checkpoint(write_checkpoint(tmp_path / "q", "glm_moe_dsa_fp8")), 2)
    config, tensors = make_checkpoint("llama")
    tensors["model.layers.0.extra.weight"] = torch.zeros(2)
    with pytest.raises(CheckpointError, match=r"1 name\(s\) without a row .*layers.0.extra"):
        ShardPlan.of(read_checkpoint(write_files(tmp_path / "x", config, tensors)), 2)


def test_an_expert_that_is_missing_is_refused_in_both_directions(tmp_path: Path) -> None:
    config, tensors = make_checkpoint("qwen3_moe")
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts.gate_up_proj needs 8 tensors"):
        ShardPlan.of(read_checkpoint(write_files(tmp_path / "in", config, tensors)), 2)


def test_rows_beyond_the_vocabulary_are_cut_off(tmp_path: Path) -> None:
    """(C25: an embedding was exported with the rows that padding had added.)"""
    config, tensors = make_checkpoint("llama")
    shards, plan = shard(write_files(tmp_path / "in", config, tensors), tmp_path / "t", 1)
    loaded = {t.name: torch.zeros(t.shape, dtype=TORCH_DTYPES[t.dtype]) for t in plan.tensors}
    load_tensors(shards, loaded)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        loaded[name] = torch.cat((loaded[name], torch.full((29, loaded[name].shape[1]), 7).bfloat16()))
    save_tensors(tmp_path / "padded", loaded)
    back = tensors_of(gather(tmp_path / "padded", config, tmp_path / "u"))
    assert back.keys() == tensors.keys()
    assert all(same(back[name], tensors[name]) for name in back)


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_metadata_that_would_run_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    shards, _ = shard(write_checkpoint(tmp_path / "in", "llama"), tmp_path / "t", 2)
    trace = tmp_path / "it-ran"
    (shards / METADATA).write_bytes(pickle.dumps(_Runs(trace)))
    with pytest.raises(TrainerStateError, match="is refused"):
        ShardReader(shards)
    assert not trace.exists()


def test_a_chunk_is_read_from_the_folder_alone(tmp_path: Path) -> None:
    shards, _ = shard(write_checkpoint(tmp_path / "in", "llama"), tmp_path / "t", 1)
    reader: Any = ShardReader(shards)
    for place in reader._metadata.storage_data.values():
        place.relative_path = "../shards/__0_0.distcp"
    with pytest.raises(CheckpointError, match="outside the folder"):
        reader("model.norm.weight")


def test_chunks_that_do_not_cover_a_tensor_are_refused(tmp_path: Path) -> None:
    shards, _ = shard(write_checkpoint(tmp_path / "in", "llama"), tmp_path / "t", 2)
    metadata = pickle.loads((shards / METADATA).read_bytes())
    metadata.state_dict_metadata["model.embed_tokens.weight"].chunks.pop()
    (shards / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight: its chunks have \d+ elements"):
        ShardReader(shards)


def test_shards_resume_by_digest_and_the_metadata_follows(tmp_path: Path) -> None:
    """(G13: a file that was cut short was trusted because it was there.)"""
    source = write_checkpoint(tmp_path / "in", "qwen3_moe")
    shards, _ = shard(source, tmp_path / "t", 3)
    before = {path.name: path.read_bytes() for path in shards.iterdir()}
    for fault in ("__1_0.distcp", METADATA):
        (shards / fault).write_bytes(before[fault][:-1] + b"x")
        shard(source, tmp_path / "t", 3)
        assert {path.name: path.read_bytes() for path in shards.iterdir()} == before
    shard(source, tmp_path / "u", 3, workers=1)
    assert {path.name: path.read_bytes() for path in (tmp_path / "u" / "shards").iterdir()} == before
