"""Transport ``disk``: a folder that trainer and engine both see, on this machine or on a filer.

    <folder>/lockstep-refit-<host>-<process>-<transfer>.lock       held by the sender while it lives (``folder_lock``)
    <folder>/lockstep-refit-<host>-<process>-<transfer>.partial/   bucket-00000.safetensors … manifest.json
    <folder>/lockstep-refit-<host>-<process>-<transfer>/           the same, renamed: who sees this name sees all of it

``manifest.json`` has the manifest and the digest of every bucket. Types of one byte (float8, e8m0) lie in the files as
uint8; the manifest names their dtype. What was loaded is removed at once; what a killed sender left is removed by the
next transfer through the same folder. While the files are written the receiver hears of every bucket, so that a long
write is no silence. Nothing is synced to the medium: the weights of a refit need not outlive a power cut.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from lockstep.interfaces import WeightReceiver, WeightSource
from lockstep.records import Manifest
from lockstep.refit.buckets import TRAILER_BYTES, Bucket, Filler, TransferError, content, plan_buckets, seal
from lockstep.refit.conversation import Conversation, peer_of
from lockstep.refit.folder_lock import PARTIAL, PREFIX, clear_left_over, held
from lockstep.refit.folder_reader import MANIFEST, bucket_file, travelling
from lockstep.refit.transfer import Contents, Transfer, whole_tensors


class DiskTransport:
    """Writes all buckets, renames the folder, has the receiver load them, removes it."""

    name = "disk"

    def __init__(self, folder: Path, *, bucket_bytes: int, timeout_s: float) -> None:
        self._folder, self._bucket_bytes, self._timeout_s = folder, bucket_bytes, timeout_s
        self._contents = Contents()

    def transfer(self, source: WeightSource, receiver: WeightReceiver) -> Transfer:
        """Move all tensors; nothing stays on the disk whatever happens to this transfer."""
        manifest = source.manifest()
        plan = plan_buckets(manifest, self._bucket_bytes)
        transfer_id = secrets.randbits(62)
        talk = Conversation(peer_of(receiver, manifest), self._timeout_s)
        with self._written(source, manifest, plan, transfer_id, talk.still_here) as (folder, digests, contents):
            talk.open({
                "transport": self.name,
                "transfer": transfer_id,
                "bucket_bytes": self._bucket_bytes,
                "path": str(folder),
            })  # fmt: skip
            for bucket, digest in zip(plan, digests, strict=True):
                talk.send(bucket.number, digest, {})
            claim = talk.close()
        num_bytes = sum(slot.num_bytes for bucket in plan for slot in bucket.slots)
        return Transfer(num_bytes, len(plan), claim, self._contents.sent(manifest.version, contents))

    def close(self) -> None:
        """Nothing is kept."""

    @contextmanager
    def _written(
        self,
        source: WeightSource,
        manifest: Manifest,
        plan: tuple[Bucket, ...],
        transfer_id: int,
        still_here: Callable[[], None],
    ) -> Iterator[tuple[Path, list[str], list[str]]]:
        name = f"{PREFIX}{socket.gethostname()}-{os.getpid()}-{transfer_id:016x}"
        partial, final = self._folder / (name + PARTIAL), (self._folder / name).absolute()
        with ExitStack() as cleared:
            with _writing(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
                clear_left_over(self._folder)
                cleared.enter_context(held(self._folder, name))
                partial.mkdir()
            digests, contents = _write_buckets(partial, source, manifest, plan, transfer_id, still_here)
            with _writing(self._folder):
                partial.rename(final)
            yield final, digests, contents


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """What the disk refuses is a TransferError that names the folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise TransferError(f"the weights can't be written to {folder}: {error}") from error


def _write_buckets(
    folder: Path,
    source: WeightSource,
    manifest: Manifest,
    plan: tuple[Bucket, ...],
    transfer_id: int,
    still_here: Callable[[], None],
) -> tuple[list[str], list[str]]:
    """Digests of the transfer's buckets, and of their bytes alone."""
    buffer = torch.empty(max((bucket.num_bytes for bucket in plan), default=0) + TRAILER_BYTES, dtype=torch.uint8)
    filler = Filler(whole_tensors(source))
    digests: list[str] = []
    contents: list[str] = []
    for bucket in plan:
        still_here()
        sums = filler.fill(bucket, buffer)
        digests.append(seal(bucket, buffer, transfer=transfer_id, version=manifest.version, sums=sums))
        contents.append(content(bucket, buffer, sums))
        with _writing(folder):
            save_file({slot.spec.name: travelling(slot, buffer) for slot in bucket.slots}, bucket_file(folder, bucket))
    filler.finish()
    still_here()
    described = {"transfer": transfer_id, "digests": digests, "manifest": asdict(manifest)}
    with _writing(folder):
        (folder / MANIFEST).write_text(json.dumps(described), encoding="utf-8")
    return digests, contents
