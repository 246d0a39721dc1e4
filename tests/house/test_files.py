"""Atomic writes: the old content or the new, never half of it, and nothing left behind."""

import os
import signal
import time

import pytest

from klatsch.files import write_atomically
from tests.support.waiting import wait_until


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


def test_killed_in_the_middle_leaves_a_whole_file(tmp_path, python):
    """A process that writes two contents in turns is killed with -9 again and again."""
    path = tmp_path / "a.bin"
    program = (
        "import sys; from pathlib import Path; from klatsch.files import write_atomically\n"
        "while True:\n"
        "    for byte in (b'a', b'b'): write_atomically(Path(sys.argv[1]), byte * 3_000_000)\n"
    )
    for k in range(5):
        writer = python("-c", program, path)
        wait_until(path.exists, writer)
        time.sleep(0.05 + 0.013 * k)  # some moment or other
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        content = path.read_bytes()
        assert len(content) == 3_000_000
        assert content in (b"a" * 3_000_000, b"b" * 3_000_000)
