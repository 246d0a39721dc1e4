"""The kernels rounds.c and wire.c: built by the machine's own C compiler at first use, cached, loaded with ctypes.

Those for a GPU (rounds.cu, normals.cu) are built in each process by the compiler that comes with torch.

Without a compiler, plain torch operations do the same. KLATSCH_NATIVE=0 turns the kernel off, KLATSCH_CACHE names
another folder for it, CC another compiler ("gcc", or with options "gcc -O2"). The file's name holds a checksum of its
content: code that is damaged, or that others may have written, is built again instead of loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from klatsch.files import write_atomically

SOURCES = tuple(Path(__file__).with_name(name) for name in ("rounds.c", "wire.c"))
ROUNDS, NORMALS = (Path(__file__).with_name(name) for name in ("rounds.cu", "normals.cu"))  # for a GPU
FLAGS = ("-std=c11", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared")

COUNT, ADDRESS = ctypes.c_int64, ctypes.c_void_p
NUMBERS = "rounds nodes columns dim rank registers buffers scratch_rows operations coefs query gradient before period"
POINTERS = "H rows mult noise sigma drawn coef op first neighbour weight buffer_of turn buffer"


MOST_SHARED = 8  # the number of CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
LARGE = 1 << 22  # bytes of a tensor
# Options of mallopt, in malloc.h. What is usual follows the largest block freed; once set, it no longer does.
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
KEEPING = {MMAP_MAX: 0, TRIM_THRESHOLD: -1}
USUAL = {MMAP_MAX: 1 << 16, MMAP_THRESHOLD: 1 << 25, TRIM_THRESHOLD: 1 << 26}  # as after large ones


class Job(ctypes.Structure):
    """The struct `job` of rounds.c."""

    _fields_ = [(n, COUNT) for n in f"{NUMBERS} first_phase samples batch".split()]
    _fields_ += [(p, ADDRESS) for p in POINTERS.split()]


@functools.cache
def allocator() -> ctypes.CDLL | None:
    """The C library, if it is glibc, whose malloc can be told what to keep."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "mallopt") else None


@contextmanager
def kept_memory(tensor: Tensor) -> Iterator[None]:
    """Have malloc keep what is freed: for large tensors on the CPU, which come and go in every round.

    Otherwise each of more than 32 MB is made of new pages, which the system fills with zeros first.
    """
    libc = None if tensor.is_cuda or tensor.nbytes < LARGE else allocator()
    if libc is None:
        yield
        return
    try:
        for option, value in KEEPING.items():
            libc.mallopt(option, value)
        yield
    finally:
        for option, value in USUAL.items():
            libc.mallopt(option, value)
        libc.malloc_trim(0)


def library() -> ctypes.CDLL:
    """The kernel; an OSError with the reason if it cannot be built or loaded."""
    if isinstance(kernel := _library(), str):
        raise OSError(kernel)
    return kernel


def call(name: str, *arguments: Tensor | int) -> None:
    """Call a function of wire.c, which there must be, with tensors and whole numbers."""
    library()[name](*(COUNT(each) if isinstance(each, int) else ADDRESS(each.data_ptr()) for each in arguments))


def why_not() -> str | None:
    """Why there is no kernel, or None if there is one."""
    return reason if isinstance(reason := _library(), str) else None


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The kernel, or why there is none; tried once, since a compiler that fails would fail again."""
    if os.environ.get("KLATSCH_NATIVE") == "0":
        return "it is turned off by KLATSCH_NATIVE=0"
    try:
        compiler = _compiler()
        folder, key = _folder(), _key(compiler)
        # A damaged file is not removed: another process may just have replaced it.
        if (kernel := _loaded(folder, key)) is None:
            _build(compiler, folder, key)
            if (kernel := _loaded(folder, key)) is None:
                return f"the kernel in {folder} is damaged right after the build"
        for rounds in (kernel.klatsch_rounds_f32, kernel.klatsch_rounds_f64):
            rounds.argtypes = [ctypes.POINTER(Job)]
    except subprocess.TimeoutExpired as error:
        return f"{error.cmd[0]} took more than {error.timeout:.0f} seconds"
    except (OSError, AttributeError) as error:
        return str(error)
    return kernel


def _compiler() -> list[str]:
    given = os.environ.get("CC") or "cc"
    try:
        name, *options = shlex.split(given)
        path = shutil.which(name)
    except ValueError:  # empty, or an unclosed quotation mark
        path = None
    if path is None:
        raise OSError(f"there is no C compiler {given!r}; install gcc or clang")
    return [path, *options]


def _loaded(folder: Path, key: str) -> ctypes.CDLL | None:
    """The cached kernel, or None if none matches the checksum in its name, or others could have written it."""
    for path in sorted(folder.glob(f"rounds-{key}-*.so")):
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # a link, or gone
            continue
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode) and _ours(status):
            with os.fdopen(os.dup(file), "rb") as content:
                whole = path.stem.endswith(f"-{_checksum(content.read())}")
            if whole:
                # By its number: another file may take the name now. It stays open as long as it is used.
                same = Path(f"/proc/self/fd/{file}")
                return ctypes.CDLL(str(same if same.exists() else path))
        os.close(file)
    return None


def _build(compiler: list[str], folder: Path, key: str) -> None:
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as place:
        built = Path(place, "rounds.so")
        command = [*compiler, *FLAGS, "-o", str(built), *map(str, SOURCES)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise OSError(f"{compiler[0]} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        content = built.read_bytes()
    write_atomically(folder / f"rounds-{key}-{_checksum(content)}.so", content, mode=0o600)


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _ours(status: os.stat_result) -> bool:
    """Whether nobody else may write to it."""
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _key(compiler: list[str]) -> str:
    """A hash of source, flags, compiler and processor: several machines may share a home folder."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    processor = platform.processor()
    if (facts := Path("/proc/cpuinfo")).exists():
        kinds = ("model name", "flags", "Features", "CPU part")
        processor = "".join(sorted({line for line in facts.read_text().splitlines() if line.startswith(kinds)}))
    parts = (*(source.read_text() for source in SOURCES), *compiler[1:], *FLAGS, version, platform.machine(), processor)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _folder() -> Path:
    """The cache if nobody else can write to it, else a private folder of this process."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(os.environ.get("KLATSCH_CACHE") or cache / "klatsch")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _ours(folder.stat()) and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError, AttributeError):  # no permission, no home, or a system without user numbers
        pass
    return Path(_private_folder().name)


@functools.cache
def _private_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="klatsch-")  # removed when the process ends


def quiet_threads(count: int) -> ThreadPoolExecutor:
    """A pool in which torch starts no further threads, which would spin for a while after each operation."""
    usual = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
    list(pool.map(int, range(count)))
    torch.set_num_threads(usual)  # the setting is per thread, but new threads inherit the latest
    return pool


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory of a block on a GPU; refuse one without clusters of blocks."""
    facts = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None or facts.major < 9:
        raise ValueError(f"{facts.name} has no clusters of blocks")
    return int(getattr(facts, "shared_memory_per_block_optin", 0))  # which the oldest torch does not tell


def gpu_kernel(source: str, name: str, device: torch.device) -> Callable[..., None]:
    """A CUDA kernel, built by the compiler that comes with torch; an OSError with the reason if that cannot be.

    It is called with blocks, threads and bytes of shared memory, and then with tensors and whole numbers of 64 bits.
    """
    try:
        return _gpu_kernel(source, name, torch.cuda.current_device() if device.index is None else device.index)
    except AttributeError as error:  # another compiler or driver than we know
        raise OSError(str(error)) from None


@functools.cache
def _gpu_kernel(source: str, name: str, device: int) -> Callable[..., None]:
    if torch.version.cuda is None:
        raise OSError("there is no CUDA compiler")
    beside = Path(torch.__file__).with_name("lib") / "libcaffe2_nvrtc.so"
    compiler = ctypes.CDLL(str(beside) if beside.exists() else f"libnvrtc.so.{torch.version.cuda.split('.')[0]}")
    driver, program, module, kernel = ctypes.CDLL("libcuda.so.1"), ADDRESS(), ADDRESS(), ADDRESS()
    size, capability = ctypes.c_size_t(), "--gpu-architecture=sm_{}{}".format(*torch.cuda.get_device_capability(device))
    options = (ctypes.c_char_p * 2)(capability.encode(), b"--std=c++17")

    def checked(status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            driver.cuGetErrorString(status, ctypes.byref(text))
            raise OSError(f"CUDA says: {(text.value or b'unknown error').decode()}")

    def launch(blocks: int, threads: int, shared: int, *given: Tensor | int) -> None:
        values = [ADDRESS(v.data_ptr()) if isinstance(v, Tensor) else COUNT(v) for v in given]
        where = (ADDRESS * len(values))(*(ctypes.addressof(v) for v in values))
        with torch.cuda.device(device):
            stream = ADDRESS(torch.cuda.current_stream().cuda_stream)
            checked(driver.cuFuncSetAttribute(kernel, MOST_SHARED, shared))
            checked(driver.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, shared, stream, where, None))

    compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    if compiler.nvrtcCompileProgram(program, len(options), options):
        compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetProgramLog(program, log)
        raise OSError(f"CUDA's compiler failed: {log.value.decode(errors='replace').strip()[:200]}")
    compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetCUBIN(program, code)
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # there is a context
        checked(driver.cuModuleLoadData(ctypes.byref(module), code))
        checked(driver.cuModuleGetFunction(ctypes.byref(kernel), module, name.encode()))
    return launch
