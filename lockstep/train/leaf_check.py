"""What a sharded optimizer is given must be leaves of autograd: checked by name, instead of patching a library for it.

A shard that is cut as a view of a parameter that requires a gradient is no leaf. Which parameters are cut that way has
depended on their dtype (NVIDIA/Megatron-LM#6212: only those kept in float32), so all-bfloat16 models never showed it,
and torch's refusal names no parameter. ``python -m lockstep.train.leaf_check`` tries what torch on this machine shards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from lockstep.hardware.mesh import two_axis_mesh


class LeafError(ValueError):
    """Tensors that an optimizer can't train, by name."""


def check_leaves(parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise ``LeafError``, with all names, unless each tensor is a leaf, requires a gradient and is given once."""
    problems: list[str] = []
    seen: dict[int, str] = {}
    for name, tensor in parameters.items():
        if not tensor.requires_grad:
            problems.append(f"{name} requires no gradient: it would never move")
        elif not tensor.is_leaf:
            made_by = type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else "an operation"
            problems.append(f"{name} is no leaf (made by {made_by}): cut the shard from parameter.detach()")
        if id(tensor) in seen:
            problems.append(f"{name} is the tensor {seen[id(tensor)]} again: it would be stepped twice")
        seen.setdefault(id(tensor), name)
    if problems:
        raise LeafError("an optimizer can't train these parameters:\n" + "\n".join(f"  {one}" for one in problems))


def sharded_parameters(device: str, *, replicated: bool) -> dict[str, torch.Tensor]:
    """Parameters of a small model with both dtypes after torch's ``fully_shard`` over a group of this one process: over
    one axis, or over a second one of replicas too (hybrid sharding), where torch takes other ways."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with _group_of_one(device):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8, dtype=torch.bfloat16), torch.nn.LayerNorm(8)).to(device)
        mesh = two_axis_mesh(device, (1, 1), ("replicate", "shard")) if replicated else init_device_mesh(device, (1,))
        for module in model:
            fully_shard(module, mesh=mesh)
        return dict(model.named_parameters())


@contextmanager
def _group_of_one(device: str) -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded_tie(device: str, *, one_group: bool) -> tuple[str, ...]:
    """Names of the parameters of an embedding and the head that is tied to it, after sharding, a forward and a
    backward: one name where the tie held. In groups of their own the two come apart, and newer torch refuses the
    forward (huggingface/accelerate#4171)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with _group_of_one(device):
        embedding, head = torch.nn.Embedding(8, 4, device=device), torch.nn.Linear(4, 8, bias=False, device=device)
        head.weight = embedding.weight
        model = torch.nn.Sequential(embedding, head)
        mesh = init_device_mesh(device, (1,))
        for together in [[embedding, head]] if one_group else [[embedding], [head]]:
            fully_shard(together, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(torch.arange(8, device=device)).sum().backward()
        return tuple(name for name, parameter in model.named_parameters() if parameter.grad is not None)


def main() -> None:
    """Check what torch shards here, on a GPU if there is one; exits 1 with the names of what is no leaf."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parameters = {
        f"{'replicated' if replicated else 'sharded'} {name}": tensor
        for replicated in (False, True)
        for name, tensor in sharded_parameters(device, replicated=replicated).items()
    }
    try:
        check_leaves(parameters)
    except LeafError as error:
        sys.exit(str(error))
    if len(tied := sharded_tie(device, one_group=True)) != 1:
        sys.exit(f"a tied embedding and head in one shard group came apart: {', '.join(tied) or 'no gradient'}")
    dtypes = sorted({str(tensor.dtype) for tensor in parameters.values()})
    shown = f"{', '.join(dtypes)}; torch {torch.__version__}; a tie held"
    print(f"{len(parameters)} sharded parameters on {device}, half of them with replicas, are leaves ({shown})")


if __name__ == "__main__":
    main()
