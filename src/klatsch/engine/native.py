"""The kernel rounds.c: built by the machine's own C compiler at first use, kept in a cache, loaded with ctypes.

Without a compiler there is no kernel, and simulations run with plain torch operations. KLATSCH_NATIVE=0 turns it off,
KLATSCH_CACHE names another folder for it, CC another compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("rounds.c")
FLAGS = ("-std=c11", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared")

NUMBERS = (
    *("rounds", "nodes", "columns", "dim", "rank", "registers", "buffers", "scratch_rows", "operations", "coefs"),
    *("query", "gradient", "period", "first_phase"),
)
POINTERS = (
    *("H", "rows", "mult", "noise", "sigma", "coef", "op", "first", "neighbour", "weight", "buffer_of", "turn"),
    "buffer",
)


class Job(ctypes.Structure):
    """The struct `job` of rounds.c."""

    _fields_ = [(name, ctypes.c_int64) for name in NUMBERS] + [(name, ctypes.c_void_p) for name in POINTERS]


def library() -> ctypes.CDLL:
    """The kernel.

    Raises:
        OSError: it cannot be built or loaded here; with the reason.
    """
    found = _library()
    if isinstance(found, str):
        raise OSError(found)
    return found


def why_not() -> str | None:
    """The reason why there is no kernel, or None if there is one."""
    found = _library()
    return found if isinstance(found, str) else None


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The kernel, or the reason why there is none; asked once, since a compiler that fails would fail again."""
    if os.environ.get("KLATSCH_NATIVE") == "0":
        return "it is turned off by KLATSCH_NATIVE=0"
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return "there is no C compiler; install gcc or clang"
    try:
        built = _folder() / f"rounds-{_key(compiler)}.so"
        if not built.exists():
            _build(compiler, built)
        kernel = ctypes.CDLL(str(built))
        for function in (kernel.klatsch_rounds_f32, kernel.klatsch_rounds_f64):
            function.argtypes, function.restype = [ctypes.POINTER(Job)], ctypes.c_int
    except (OSError, AttributeError) as error:
        return str(error)
    return kernel


def _build(compiler: str, target: Path) -> None:
    # Under another name first: two processes may build at once, and a killed one must not leave half a file.
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".so", delete=False) as file:
        temporary = Path(file.name)
    try:
        command = [compiler, *FLAGS, "-o", str(temporary), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise OSError(f"{compiler} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        temporary.replace(target)
    except subprocess.TimeoutExpired:
        raise OSError(f"{compiler} took more than five minutes") from None
    finally:
        temporary.unlink(missing_ok=True)


def _key(compiler: str) -> str:
    """What the code depends on: source, flags, compiler and processor (a home folder may serve many machines)."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    processor = platform.processor()
    if (facts := Path("/proc/cpuinfo")).exists():
        kinds = ("model name", "flags", "Features", "CPU part")
        processor = "".join(sorted({line for line in facts.read_text().splitlines() if line.startswith(kinds)}))
    parts = (SOURCE.read_text(), *FLAGS, version, platform.machine(), processor)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _folder() -> Path:
    """The cache, if nobody else can put code there; else a folder of this process only."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(os.environ.get("KLATSCH_CACHE") or cache / "klatsch")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        private = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if private and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError, AttributeError):  # no such right, no home, or no user numbers on this system
        pass
    return _private_folder()


@functools.cache
def _private_folder() -> Path:
    holder = tempfile.TemporaryDirectory(prefix="klatsch-")
    _private_folder.holder = holder  # type: ignore[attr-defined]  # removed when the process ends
    return Path(holder.name)
