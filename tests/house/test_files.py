"""Atomic writes: the old content or the new, never half of it, and nothing left behind."""

import os
import signal

import pytest

from klatsch.files import write_atomically


def test_replaces_the_whole_content(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old and longer")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.txt"]
    plain = tmp_path / "plain.txt"
    plain.write_text("")
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_failed_write_keeps_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


MOMENTS = {  # of a second write, at which the process is killed; and what is there then
    "in the middle of the write": ("resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))", b"a"),
    "before it is on the disk": ("os.fsync = die", b"a"),
    "before it has its name": ("Path.replace = die", b"a"),
    "before the folder is on the disk": ("Path.unlink = die", b"b"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_leaves_a_whole_file(tmp_path, python, moment):
    path, (deadly, byte) = tmp_path / "a.bin", MOMENTS[moment]
    program = (
        "import os, resource, signal, sys; from pathlib import Path; from klatsch.files import write_atomically\n"
        "def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"
        "write_atomically(Path(sys.argv[1]), b'a' * 3_000_000)\n"
        f"{deadly}\n"
        "write_atomically(Path(sys.argv[1]), b'b' * 3_000_000)\n"
    )
    assert python("-c", program, path).done().returncode in (-signal.SIGKILL, -signal.SIGXFSZ)
    assert path.read_bytes() == byte * 3_000_000
