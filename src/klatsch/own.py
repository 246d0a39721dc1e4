"""A user's parts by name: "file.py:name" is a rule, a problem or a topology in a Python file, which is executed."""

from __future__ import annotations

import difflib
import hashlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

_lock = threading.RLock()  # batches run in threads, and each file is executed once


def is_own(name: object) -> bool:
    """Whether a name stands for a custom part."""
    return isinstance(name, str) and ".py:" in name


def located(name: str, folder: str | Path = "") -> str:
    """The name of a custom part with its absolute path, for processes elsewhere; other names as they are."""
    if not is_own(name):
        return name
    before, _, H = name.rpartition("/")
    if H.isdigit():  # "file.py:graph/8" gossips in every 8th round
        return f"{located(before, folder)}/{H}"
    path, part = _split(name)
    try:
        return f"{os.path.abspath(Path(folder) / path.expanduser())}:{part}"
    except RuntimeError as error:  # "~nobody"
        raise ValueError(f"{name!r}: {error}; give the whole path") from None


def label(name: str) -> str:
    """Its name in tables, without the folder: "file.py:name"."""
    return f"{_split(name)[0].name}:{part_of(name)}" if is_own(name) else name


def part_of(name: str) -> str:
    """Its name in its file."""
    return _split(name)[1]


def digest(name: str) -> str:
    """SHA-256 of the file: an edited file has other parts."""
    return hashlib.sha256(_read(_split(name)[0])).hexdigest()


def load(kind: str, name: str) -> Any:
    """The class or function "file.py:name"; `kind` is what it makes, for errors."""
    path, part = _split(name)
    module = _executed(path, _read(path))
    if part not in vars(module):
        parts = (type, FunctionType)
        made = [n for n, v in vars(module).items() if isinstance(v, parts) and v.__module__ == module.__name__]
        close = difflib.get_close_matches(part, made, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(made) or 'no class or function'}"
        raise ValueError(f"{path} has no {part}; {hint}")
    if not callable(thing := vars(module)[part]):
        raise ValueError(f"{part} in {path} is a {type(thing).__name__}; give a class or function that makes a {kind}")
    return thing


@contextmanager
def explained(*names: str) -> Iterator[None]:
    """Turn what a user's code raises into one line with its place; a ValueError stays as it is."""
    paths = [_split(name)[0] for name in names if is_own(name)]
    try:
        yield
    except (ValueError, MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a user's code may raise anything
        if not paths or (isinstance(error, RuntimeError) and "memory" in str(error)):
            raise
        raise ValueError(_told(error, paths)) from None


def _split(name: str) -> tuple[Path, str]:
    path, _, part = name.rpartition(":")
    if not path.endswith(".py") or not part.isidentifier() or not path.isprintable():
        raise ValueError(f"{name!r}; give FILE.py:NAME, the class or function in a Python file")
    return Path(path), part


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}; give FILE.py:NAME of a file that exists") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give FILE.py:NAME of a Python file") from None


def _executed(path: Path, source: bytes) -> ModuleType:
    """The module of a file, executed once for each content; its name is unique, so that files do not clash."""
    path = Path(os.path.abspath(path))
    unique = "klatsch_own_" + hashlib.sha256(str(path).encode() + source).hexdigest()[:24]
    with _lock:
        if unique in sys.modules:
            return sys.modules[unique]
        module = ModuleType(unique)
        module.__file__ = str(path)
        sys.modules[unique] = module  # where dataclasses look up annotations
        try:
            exec(compile(source, str(path), "exec"), vars(module))
        except BaseException as error:
            del sys.modules[unique]
            if isinstance(error, KeyboardInterrupt):
                raise
            raise ValueError(_told(error, [path])) from None
        return module


def _told(error: BaseException, paths: list[Path]) -> str:
    """An error in one line, with its last place in one of the files."""
    names = {os.path.abspath(path) for path in paths}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in names]
    place = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ", ".join(sorted(names))
    reason = (str(error).splitlines() or [""])[0]
    if isinstance(error, SyntaxError) and error.filename in names:
        place, reason = f"{error.filename}, line {error.lineno}", error.msg
    return f"{place}: {type(error).__name__}: {reason}; fix it and rerun"
