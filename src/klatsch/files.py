"""Files that are whole or absent: written to a temporary name, synced, then renamed."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def save(path: Path, data: bytes) -> None:
    """Write a file atomically for a user, who is told in one line where that fails.

    Raises:
        ValueError: it cannot be written.
    """
    try:
        write_atomically(path, data)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; choose another folder or name") from None


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a crash at any moment leaves either the old content or the new."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself must survive a power cut
    finally:
        os.close(folder)
