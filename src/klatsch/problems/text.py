"""Text that needs no download: the source of Python's standard library, or any folder, cut into windows of bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from itertools import groupby
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Of the standard library. Tests are more than half of it, would make half of the nodes alike, and are not installed
# everywhere; the last two differ between two builds of one version.
LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "config-*", "_sysconfigdata*")
INSTALLED = "site-packages"  # as a folder: where the packages beside klatsch are installed, a few hundred MB
HELD_OUT = 0.1  # of the text of every package


class File(NamedTuple):
    """A file, by its path in the folder."""

    path: PurePath
    content: bytes

    @property
    def package(self) -> str:
        """What it belongs to: the folder or file at the top, which in Python's library is what one imports."""
        return self.path.parts[0]

    @property
    def folder(self) -> str:
        """The folder at the top; empty for files that lie there."""
        return self.path.parts[0] if len(self.path.parts) > 1 else ""


class Windows(NamedTuple):
    """Windows of text, bytes of shape (windows, size): those to learn from, and those that are held out."""

    learnt: Tensor
    held_out: Tensor


def content(folder: str | Path | None, pattern: str) -> str:
    """SHA-256 of the files that `load` reads, with their names."""
    hashed = hashlib.sha256()
    for path, data in _read(folder, pattern):
        hashed.update(f"{path.as_posix()}\0{len(data)}\0".encode())
        hashed.update(data)
    return hashed.hexdigest()


def library() -> Path:
    """Where the source of Python's standard library is."""
    return Path(sysconfig.get_paths()["stdlib"])


@lru_cache(maxsize=4)
def load(folder: str | Path | None, pattern: str, size: int) -> tuple[Windows, NDArray[np.int64]]:
    """The files of a folder, or the standard library, in windows of `size` bytes; and the package of each to learn."""
    kept, held_out = [], []
    for _, files in _grouped(_read(folder, pattern), lambda file: file.folder):
        apart = _apart(files)
        held_out += [file for file in files if file in apart]
        kept += [file for file in files if file not in apart]
    learnt = [_windows(files, size) for _, files in _grouped(kept, lambda file: file.package)]
    measured = [_windows(files, size) for _, files in _grouped(held_out, lambda file: file.folder)]
    for what, windows in (("to learn from", learnt), ("held out", measured)):
        if not sum(map(len, windows)):
            raise ValueError(
                f"{_place(folder)} has no {size:,} bytes of text {what}, of {len(kept)} and {len(held_out)} files; "
                "give more or longer files, or a shorter context"
            )
    return Windows(torch.cat(learnt), torch.cat(measured)), np.repeat(np.arange(len(learnt)), list(map(len, learnt)))


def _apart(files: Sequence[File]) -> set[File]:
    """The files of a folder that are held out: whole ones, about a tenth of its text, at least one of several."""
    chosen: set[File] = set()
    room = HELD_OUT * sum(len(file.content) for file in files)
    for file in sorted(files, key=lambda file: hashlib.sha256(file.path.as_posix().encode()).digest()):
        if len(file.content) <= room:
            chosen.add(file)
            room -= len(file.content)
    if len(files) > 1 and not chosen:
        chosen.add(min(files, key=lambda file: (len(file.content), file.path)))
    return chosen


def _windows(files: Iterable[File], size: int) -> Tensor:
    """The text of files, one after the other, in windows that do not overlap; the rest is not used."""
    joined = bytearray(b"".join(file.content for file in files))
    whole = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    return whole[: len(whole) // size * size].view(-1, size)


def _grouped(files: Iterable[File], name: Callable[[File], str]) -> list[tuple[str, list[File]]]:
    return [(key, list(group)) for key, group in groupby(sorted(files, key=lambda file: (name(file), file.path)), name)]


@lru_cache(maxsize=4)
def _read(folder: str | Path | None, pattern: str) -> tuple[File, ...]:
    root = _root(folder)
    if not root.is_dir():
        raise ValueError(f"{_place(folder)} is not a folder; give one with text, or none for Python's own source")
    left_out = LEFT_OUT if folder is None else ()
    try:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError
        paths = sorted(path.relative_to(root) for path in root.rglob(pattern) if path.is_file())
        names = [p for p in paths if not any(fnmatch(part, name) for part in p.parts for name in left_out)]
        files = [File(PurePath(path), (root / path).read_bytes()) for path in names]
    except (NotImplementedError, ValueError, IndexError):  # pathlib's refusals
        raise ValueError(f"pattern = {pattern!r}; give names of files, such as *.txt") from None
    except OSError as error:
        raise ValueError(f"cannot read {error.filename}: {error.strerror}; give a folder of readable files") from None
    if not any(file.content for file in files):
        raise ValueError(f"{_place(folder)} has no text in files named {pattern}; give another pattern or folder")
    return tuple(file for file in files if file.content)


def _root(folder: str | Path | None) -> Path:
    if folder == INSTALLED:
        return Path(sysconfig.get_paths()["purelib"])
    return library() if folder is None else Path(folder).expanduser()


def _place(folder: str | Path | None) -> str:
    return f"Python's standard library in {library()}" if folder is None else f"folder = {folder}"
