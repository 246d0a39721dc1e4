"""A damaged or foreign kernel in the cache is built again, and is never run."""

import os
import re
import shutil

import pytest

from klatsch import native

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=f"no fused engine: {native.why_not()}")

PROGRAM = """
import klatsch
from klatsch import native
native.FLAGS += ("-O0",)  # built in a moment: how fast it runs does not matter here
assert native.why_not() is None, native.why_not()
graph = klatsch.topology.ring(3)
print(klatsch.simulate(klatsch.problems.LeastSquares(3, dim=4), klatsch.rules.make("dsgd", 0.001), graph, 30).engine)
"""


@pytest.fixture(scope="module")
def whole(prepared, tmp_path_factory):
    """A cache with a kernel, as a process with loose habits made it."""
    folder = tmp_path_factory.mktemp("kernel") / "cache"
    before = os.umask(0o002)
    try:
        assert (
            simulate(prepared, folder, CC=f"{shutil.which(os.environ.get('CC') or 'cc')} -O2 -DTOLD='a b'") == "fused\n"
        )
    finally:
        os.umask(before)
    return folder


@pytest.fixture
def cache(whole, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", f"{shutil.which(os.environ.get('CC') or 'cc')} -O2 -DTOLD='a b'")
    return shutil.copytree(whole, tmp_path / "cache")


def simulate(prepared, cache, **variables):
    """Run a small simulation in a process of its own; gives what it printed, or its signal and its errors."""
    environment = os.environ | {"KLATSCH_CACHE": str(cache), **variables}
    done = prepared.python("-c", PROGRAM, env=environment).done()
    return done.stdout if done.returncode == 0 else (done.returncode, done.stderr)


def kernel(cache):
    (path,) = cache.glob("rounds-*.so")
    return path


def truncated(path):
    os.truncate(path, path.stat().st_size // 2)


def zeroed(path):
    content = path.read_bytes()
    path.write_bytes(content[:4096] + bytes(len(content) - 4096))


def one_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def a_link(path):
    path.rename(path.with_name("elsewhere.so"))
    path.symlink_to("elsewhere.so")


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def writable_by_others(path):
    path.chmod(0o666)


def foreign(path):
    if os.getuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, 12345, -1)


def test_a_damaged_kernel_is_built_again(cache, prepared):
    truncated(kernel(cache))
    assert simulate(prepared, cache) == "fused\n"
    again = kernel(cache)
    assert again.name.endswith(f"-{native._checksum(again.read_bytes())}.so")
    assert list(cache.iterdir()) == [again]


def test_a_whole_one_is_not_built_again(cache, prepared):
    """With a loose umask and with options of the compiler, as the fixture made it."""
    assert kernel(cache).stat().st_mode & 0o777 == 0o600
    stamp = kernel(cache).stat().st_mtime_ns
    assert simulate(prepared, cache) == "fused\n"
    assert kernel(cache).stat().st_mtime_ns == stamp


@pytest.mark.parametrize("damage", [truncated, zeroed, empty, one_bit, a_link, a_pipe, writable_by_others, foreign])
def test_what_is_damaged_or_may_be_of_others_is_not_loaded(damage, cache, tmp_path):
    """A copy is damaged: who cuts a file that is mapped into this process kills it when it ends (SIGBUS)."""
    key = kernel(cache).name.split("-")[1]
    damaged = shutil.copytree(cache, tmp_path / "damaged")
    assert native._loaded(cache, key) is not None
    damage(kernel(damaged))
    assert native._loaded(damaged, key) is None


def test_what_is_in_the_way_is_replaced(cache, prepared):
    a_link(kernel(cache))
    assert simulate(prepared, cache) == "fused\n"
    assert not kernel(cache).is_symlink()


@pytest.mark.parametrize("wrong", ["no-such-compiler -O2", "cc '", " "])
def test_what_is_no_compiler_is_said(wrong, monkeypatch):
    monkeypatch.setenv("CC", wrong)
    with pytest.raises(OSError, match=f"there is no C compiler {re.escape(repr(wrong))}; install gcc or clang"):
        native._compiler()


def test_the_file_that_is_checked_is_the_file_that_is_loaded(cache, monkeypatch):
    """Another file that takes the name between the check and the loading is not loaded."""
    loading, loaded = native.ctypes.CDLL, []

    def swap_first(name):
        kernel(cache).rename(cache / "checked")
        (cache / f"rounds-{key}-{'0' * 32}.so").write_bytes(b"something else")
        loaded.append(os.stat(name).st_ino)
        return loading(name)

    key = kernel(cache).name.split("-")[1]
    monkeypatch.setattr(native.ctypes, "CDLL", swap_first)
    assert native._loaded(cache, key) is not None
    assert loaded == [(cache / "checked").stat().st_ino]
