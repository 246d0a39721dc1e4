"""CUDA kernels on a CPU: their source behind emulated.cpp, built by a C++ compiler."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from torch import Tensor

COMPILER = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
BLOCKS = 2  # in a cluster
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-w")


@functools.cache
def kernel(source, name, device=None):
    """Stands for `native.gpu_kernel`."""
    run = 'extern "C" void run(int blocks, int threads, size_t shared, void **given) {'
    launch = f"{run} launch({name}, blocks, threads, shared, given); }}"
    shim = Path(__file__).with_name("emulated.cpp").read_text()
    with tempfile.TemporaryDirectory() as folder:
        place, built = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        place.write_text(f"#define CLUSTER {BLOCKS}\n{shim}\n{source}\n{launch}\n")
        done = subprocess.run([COMPILER, *FLAGS, place, "-o", built], capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr
        library = ctypes.CDLL(str(built))

    def on_cpu(blocks, threads, shared, *given):
        values = [ctypes.c_void_p(v.data_ptr()) if isinstance(v, Tensor) else ctypes.c_int64(v) for v in given]
        where = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        library.run(blocks, threads, ctypes.c_size_t(shared), where)

    return on_cpu
