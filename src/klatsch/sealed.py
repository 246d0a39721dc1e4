"""The file format of all checkpoints, of simulations and ranks: safetensors with a header and a checksum, no pickle."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klatsch.extras import VERSION
from klatsch.files import json_of, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

REMEDY = "move the file away or choose another checkpoint path"
OTHER = "of another version"
LARGEST_HEADER = 100_000_000  # bytes: that of safetensors


class CheckpointError(ValueError):
    """A checkpoint that is damaged, of another version, or belongs to another run; `trouble` says it in short."""

    def __init__(self, text: str, trouble: str = "damaged") -> None:
        super().__init__(text)
        self.trouble = trouble


def write(path: Path, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a file that is whole or absent; the header is plain data, with the "format" of the file."""
    from safetensors.torch import save as pack

    # clone: safetensors refuses tensors that share memory, as w and x do at the start
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    header = header | {"version": VERSION}
    header |= {"sha256": digest(tensors, header)}
    try:
        write_atomically(path, pack(tensors, metadata={"klatsch": json.dumps(header)}))
    except OSError as error:
        raise OSError(
            f"cannot write the checkpoint {path}: {error.strerror}; free some space, or choose another place, and run "
            "again: what was finished or saved before is safe"
        ) from None


def read(path: Path, format_: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a file."""
    from safetensors import SafetensorError, safe_open

    header = header_of(path, format_)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from None
    if header.pop("sha256", None) != digest(tensors, header):
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum; {REMEDY}")
    return header, tensors


def header_of(path: Path, format_: str) -> dict[str, Any]:
    """The header of a file that is as long as it should be; its checksum is not compared. Needs no torch."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would have no end
            raise CheckpointError(f"{path} is a folder, a pipe or a device, and not a checkpoint; {REMEDY}")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(LARGEST_HEADER, status.st_size):
                raise ValueError("its header is longer than the file")
            entries = json_of(file.read(length))
        facts = entries.pop("__metadata__", {})
        if 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0) != status.st_size:
            raise ValueError("it is cut off, or too long")
        header = json_of(facts.get("klatsch", "{}"))
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from None
    except (TypeError, KeyError, IndexError, AttributeError):
        raise _damaged(path, "its header is of another kind") from None
    if not isinstance(header, dict) or not isinstance(header.get("format"), str):
        raise _damaged(path, "it is not of klatsch")
    if header["format"] != format_:
        versions = (
            f"{header['format']!r:.60} of klatsch {header.get('version', '?')!r:.60}; {VERSION} reads {format_!r}"
        )
        remedy = f"go on with the version that wrote it, or {REMEDY}"
        raise CheckpointError(f"{path} is a checkpoint of another kind or version ({versions}); {remedy}", OTHER)
    return header


def digest(tensors: dict[str, Tensor], facts: dict[str, Any]) -> str:
    """SHA-256 of tensors on the CPU, by name, and of plain facts."""
    import torch

    hashed = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        hashed.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        hashed.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def _damaged(path: Path, error: object) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or not a checkpoint ({error}); {REMEDY}")
