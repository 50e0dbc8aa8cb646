"""Where the source is: a folder that is used in place, or a name on the Hugging Face hub where there is a network.

A download takes safetensors and text files of one commit, never a pickle, into the target; the commit is recorded, so
that a rerun asks for the same one.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from lockstep.checkpoint.errors import CheckpointError
from lockstep.checkpoint.folder import list_folder
from lockstep.checkpoint.records import CheckpointIndex

PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "README.md")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def fetch(source: str, revision: str | None, target: Path) -> tuple[Path, str | None]:
    """(folder, commit): a folder as it is, or a hub name downloaded into ``target``.

    Raises CheckpointError, with the way out, for a name that is neither, and where the hub can't be reached.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise CheckpointError(source, [f"is a folder: prepare.revision = {revision!r} has no meaning for it"])
        return folder, None
    if not _HUB_NAME.fullmatch(source):
        raise CheckpointError(source, ["is no folder, and no name on the hub (owner/name): check --source"])
    from huggingface_hub import HfApi, snapshot_download

    try:
        commit = HfApi().model_info(source, revision=revision).sha
        snapshot_download(source, revision=commit, allow_patterns=list(PATTERNS), local_dir=target)
    except Exception as error:  # of the client, of its transport, of the system: the way out is the same
        reason = str(error).strip().splitlines()
        why = f"{type(error).__name__}: {reason[0] if reason else 'no reason given'}"
        way_out = "download it where there is a network, copy the folder here and give it as --source"
        raise CheckpointError(source, [f"is no folder here, and the hub did not give it ({why}); {way_out}"]) from error
    return target, commit


def fingerprint(index: CheckpointIndex) -> dict[str, Any]:
    """What tells a source from another: size, time of change and header digest of each weight file, and the digests of
    the small files.

    It costs no read of the weights. A byte of weights that changes while size and time stay is not seen by it.
    """
    files: dict[str, Any] = {}
    listed = list_folder(index.folder, [])
    if listed is None:
        raise CheckpointError(index.folder, ["is gone"])
    for name, path in listed.weights.items():
        status = path.stat()
        with path.open("rb") as file:
            header = file.read(8)
            header += file.read(int.from_bytes(header, "little"))
        files[name] = {
            "bytes": status.st_size,
            "changed_ns": status.st_mtime_ns,
            "header_sha256": hashlib.sha256(header).hexdigest(),
        }
    for name, path in listed.others.items():
        if path.stat().st_size <= 64 << 20:
            files[name] = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    return files
