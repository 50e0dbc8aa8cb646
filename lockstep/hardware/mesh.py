"""A device mesh of two axes, by the means that this torch has."""

from __future__ import annotations

from typing import Any

from lockstep.hardware.capabilities import mesh_unflatten


def two_axis_mesh(device: str, sizes: tuple[int, int], names: tuple[str, str]) -> Any:
    """A ``DeviceMesh`` of outer × inner ranks, outer first: ranks of one inner group are neighbours.

    Where an axis can be split, one mesh over all ranks is made and split, so that it shares its process group with
    other meshes of the same ranks; elsewhere the two axes are built from the start. Both place every rank alike. Raises
    ValueError if the sizes do not make up the world. torch.distributed must be initialised.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    if sizes[0] * sizes[1] != world:
        product = f"{names[0]} {sizes[0]} · {names[1]} {sizes[1]} = {sizes[0] * sizes[1]}"
        raise ValueError(f"{product} is not the world of {world}")
    if not mesh_unflatten().present:
        return init_device_mesh(device, sizes, mesh_dim_names=names)
    flat: Any = init_device_mesh(device, (world,), mesh_dim_names=("_".join(names),))
    return flat._unflatten(0, sizes, names)
