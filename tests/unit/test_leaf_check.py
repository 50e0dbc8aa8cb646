"""Parameters of an optimizer are leaves, required, and given once; the refusal names each one that is not."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lockstep.config.schema import TrainerConfig
from lockstep.train.leaf_check import LeafError, check_leaves, sharded_tie
from lockstep.train.optimizer import MasterOptimizer


def shard(parameter: torch.nn.Parameter, *, detached: bool) -> torch.Tensor:
    """Half of a parameter, cut as a distributed optimizer does."""
    return (parameter.detach() if detached else parameter).view(-1)[:4]


def test_a_shard_that_is_a_view_is_named_and_a_detached_one_passes() -> None:
    kept = torch.nn.Parameter(torch.ones(8))
    half = shard(kept, detached=True).requires_grad_()
    check_leaves({"whole": kept, "half": half})
    with pytest.raises(LeafError) as error:
        check_leaves({"whole": kept, "attn_sink": shard(kept, detached=False), "frozen": torch.ones(2), "again": kept})
    text = str(error.value)
    assert "attn_sink is no leaf (made by SliceBackward0): cut the shard from parameter.detach()" in text
    assert "frozen requires no gradient" in text
    assert "again is the tensor whole again" in text


def test_the_trainers_optimizer_refuses_it_before_adam_does() -> None:
    live = {"a": torch.nn.Parameter(torch.ones(4)), "b": shard(torch.nn.Parameter(torch.ones(8)), detached=False)}
    with pytest.raises(LeafError, match="b is no leaf"):
        MasterOptimizer(live, TrainerConfig(dtype="float32"), 1)  # type: ignore[arg-type]


def test_what_torch_shards_here_are_leaves() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.train.leaf_check"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "8 sharded parameters on" in done.stdout
    assert "half of them with replicas" in done.stdout
    assert "torch.bfloat16, torch.float32" in done.stdout
    assert "a tie held" in done.stdout


def test_a_tied_head_and_its_embedding_are_one_parameter_in_one_shard_group_only() -> None:
    """huggingface/accelerate#4171: shared between two groups, the parameter fails at the first forward."""
    assert sharded_tie("cpu", one_group=True) == ("0.weight",)
    with pytest.raises(ValueError, match=r"shared.*another FSDP group"):
        sharded_tie("cpu", one_group=False)
