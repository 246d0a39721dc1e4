"""Files that are whole or absent, and never replace a file of another kind; the folders they go to, and their JSON."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LARGEST = 1 << 20  # bytes of a text written by hand
LEAST_TOKEN = 16  # characters
HEAD = 4096  # bytes of a file that tell its kind
KINDS = {
    "SQLite": rb"SQLite format 3\0",
    "PNG": rb"\x89PNG",
    "PDF": rb"%PDF-",
    "Parquet": rb"PAR1",
    "gzip": rb"\x1f\x8b",
    "SVG": rb"\s*<(\?xml|svg)",
    "HTML": rb"(?is)\s*(<!--.*?-->\s*)*<(!doctype )?html",
    "JSON": rb"\s*\{",
    "CSV": rb"problem,",  # the first column of klatsch
}
ENDINGS = {".csv": "CSV", ".md": "Markdown"}  # texts without a typical beginning


def check_output(path: Path, kind: str, *inputs: Path) -> None:
    """Refuse an output that would replace a file of another kind, or one of the inputs; called before the work."""
    try:
        if any(_same(path, other) for other in inputs):
            raise ValueError(f"cannot write {path}: that file is an input, or another output; give another name")
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"cannot write {path}: give the name of a file in a folder that exists")
        if not path.exists():
            return
        if not path.is_file():
            raise ValueError(f"cannot write {path}: it is not an ordinary file; give another name")
        with path.open("rb") as file:
            head = file.read(HEAD)
        held = kind_of(head, path.stat().st_size) or (None if b"\0" in head else ENDINGS.get(path.suffix.lower()))
    except OSError as error:
        raise ValueError(_cannot(path, error)) from None
    if head.strip() and held != kind:
        raise ValueError(
            f"cannot write {path}: it holds {held or 'something else'}, and would become {kind}; give another name, "
            "or remove it first"
        )


def kind_of(head: bytes, size: int) -> str | None:
    """The kind of a file by its first bytes and its size; None if it is unknown."""
    if 0 < int.from_bytes(head[:8], "little") <= size - 8 and head[8:9] == b"{":
        return "safetensors"
    text = head.removeprefix(b"\xef\xbb\xbf")  # some editors write it first
    return next((kind for kind, beginning in KINDS.items() if re.match(beginning, text)), None)


def save(path: Path, data: bytes, kind: str) -> None:
    """Write a file of one of `KINDS` atomically; a file of another kind is not replaced."""
    check_output(path, kind)
    try:
        write_atomically(path, data)
    except OSError as error:
        raise ValueError(_cannot(path, error)) from None


def write_atomically(path: Path, data: bytes, mode: int | None = None) -> None:
    """Write a file so that a crash at any moment leaves the old content or the new; `mode` sets its rights."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename must survive a power cut
    finally:
        os.close(folder)


def folder_for(what: str, folder: str | Path, remedy: str = "choose another folder") -> Path:
    """A folder to write to, which is made if there is none."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(0, "it is not writable")
    except OSError as error:
        raise ValueError(f"cannot use {folder} for {what}: {error.strerror}; {remedy}") from None
    return Path(folder)


def text_of(path: Path) -> str:
    """The text of a small file; not of a device or a pipe, which may have no end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} is not a plain file, but a device or a pipe; give the name of a text file")
    with path.open("rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ValueError(f"{path} is larger than {LARGEST >> 20} MiB; give a smaller file")
    return data.decode()


def token_of(path: str | Path | None, make: bool = False) -> bytes:
    """The token in a file, which may be made; empty without one."""
    if path is None:
        return b""
    path = Path(path)
    if make and not path.exists():
        try:
            end = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ValueError(f"cannot make the token file {path}: {error.strerror}; choose another folder") from None
        with os.fdopen(end, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    if not path.is_file():
        raise ValueError(f"there is no token file {path}; copy the one of klatsch crew serve --token-file here")
    token = text_of(path).strip().encode()
    if len(token) < LEAST_TOKEN:
        raise ValueError(f"the token in {path} has {len(token)} characters; give it at least {LEAST_TOKEN}")
    return token


def json_of(text: str | bytes) -> Any:
    """A text as JSON; a ValueError however it is broken."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def finite(content: object) -> object:
    """A content for JSON, which has no infinity: numbers that are not finite are null."""
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _same(path: Path, other: Path) -> bool:
    """Whether two names are one file, also through links or before it exists."""
    hard = path.exists() and other.exists() and path.samefile(other)
    return hard or os.path.realpath(path) == os.path.realpath(other)


def _cannot(path: Path, error: OSError) -> str:
    return f"cannot write {path}: {error.strerror}; choose another folder or name"
