"""The data set: where it is looked for, in which order, and that nothing but the right content is used."""

import gzip
import http.server
import os
import re
import shutil
import socketserver
import threading
from pathlib import Path

import pytest
import torch

from klatsch.problems import fashion_mnist
from klatsch.problems.fashion_mnist import CONTENT, load
from tests.support.machine import DATA, needs_data


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """A machine that has no data set and no network."""
    monkeypatch.delenv("KLATSCH_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fashion_mnist, "DEBIAN", tmp_path / "debian")
    monkeypatch.setattr(fashion_mnist, "MIRRORS", ("http://127.0.0.1:9/",))
    fashion_mnist._read.cache_clear()
    yield
    fashion_mnist._read.cache_clear()


def copied(folder, unpacked=False):
    folder.mkdir(parents=True)
    for name in CONTENT:
        packed = DATA / f"{name}.gz"
        if unpacked:
            (folder / name).write_bytes(gzip.decompress(packed.read_bytes()))
        else:
            (folder / packed.name).symlink_to(packed)
    return folder


@pytest.mark.slow
@needs_data
def test_the_content_is_fashion_mnist():
    data = load(DATA)
    data.check()
    assert data.images.shape == (60_000, 1, 28, 28)
    assert data.test_images.shape == (10_000, 1, 28, 28)
    assert data.images.dtype == torch.uint8
    assert torch.equal(torch.bincount(data.labels), torch.full((10,), 6_000))  # bits: whole numbers
    assert torch.equal(torch.bincount(data.test_labels), torch.full((10,), 1_000))  # bits: whole numbers
    mean, factor = data.scale()
    pixels = (data.images[:].float() - mean) * factor
    assert abs(float(pixels.mean())) < 1e-3
    assert abs(float(pixels.std()) - 1) < 1e-3


@pytest.mark.slow
@needs_data
def test_places_are_tried_in_order(tmp_path, monkeypatch):
    """Every place alone is found; and where there are two, a damaged one that comes first is named."""
    places = {
        "--data": tmp_path / "given",
        "variable": tmp_path / "variable",
        "cache": fashion_mnist.cache(),
        "debian": fashion_mnist.DEBIAN,
    }
    for name in reversed(places):
        folder = copied(places[name], unpacked=name == "debian")
        monkeypatch.setenv("KLATSCH_DATA", str(places["variable"]) if name in ("--data", "variable") else "")
        fashion_mnist._read.cache_clear()
        assert len(load(folder if name == "--data" else None).labels) == 60_000
        # From now on this place is broken, and what comes before it must win.
        broken = next(folder.glob("t10k-labels*"))
        broken.unlink()
        broken.write_bytes(b"something else")
        fashion_mnist._read.cache_clear()
        with pytest.raises(ValueError, match=r"t10k-labels-idx1-ubyte.* is not t10k-labels"):
            load(folder if name == "--data" else None)


def damaged(kind, packed):
    data = packed.read_bytes()
    content = gzip.decompress(data)
    return {
        "cut off": data[: len(data) // 2],
        "no gzip at all": b"\x1f\x8b" + b"nonsense" * 100,
        "other content": gzip.compress(content[:-1] + bytes([content[-1] ^ 1])),
        "too large": gzip.compress(bytes(fashion_mnist.LARGEST + 10)),
    }[kind]


@pytest.mark.slow
@needs_data
@pytest.mark.parametrize("kind", ["cut off", "no gzip at all", "other content", "too large"])
def test_a_damaged_file_is_named_and_not_used(tmp_path, kind):
    folder = copied(tmp_path / "data")
    victim = folder / "t10k-labels-idx1-ubyte.gz"
    victim.unlink()
    victim.write_bytes(damaged(kind, DATA / victim.name))
    with pytest.raises(ValueError, match=re.escape(str(victim))) as refusal:
        load(folder)
    assert "is not used" in str(refusal.value)
    assert "dataset-fashion-mnist" in str(refusal.value)


@pytest.mark.parametrize(
    "prepare, found",
    [
        (lambda path: {"folder": path / "none"}, "is not a folder"),
        (lambda path: {"folder": path}, "has no train-images-idx3-ubyte.gz"),
        (lambda path: {"download": False}, "is not on this machine"),
        (lambda path: {}, "cannot be downloaded"),
    ],
)
def test_missing_data_says_the_three_ways_to_get_it(tmp_path, prepare, found):
    with pytest.raises(ValueError, match=found) as refusal:
        load(**prepare(tmp_path))
    message = str(refusal.value)
    for part in ("--data", "KLATSCH_DATA", "dataset-fashion-mnist"):
        assert part in message
    assert "\n" not in message


@pytest.mark.slow
@needs_data
def test_it_is_downloaded_once_and_verified(tmp_path, monkeypatch):
    """From real servers: the first answers nonsense, the second gives something else, the third the files."""
    site = tmp_path / "site"
    (site / "wrong").mkdir(parents=True)
    for name in CONTENT:
        shutil.copy(DATA / f"{name}.gz", site / f"{name}.gz")
        (site / "wrong" / f"{name}.gz").write_bytes(gzip.compress(b"<html>moved</html>"))
    asked = []

    class Garbage(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.sendall(b"this is no HTTP\r\n\r\n")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(site))

        def log_message(self, *arguments):
            asked.append(self.path)

    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server,
        socketserver.ThreadingTCPServer(("127.0.0.1", 0), Garbage) as garbage,
    ):
        for each in (server, garbage):
            threading.Thread(target=each.serve_forever, daemon=True).start()
        base, portal = (f"http://127.0.0.1:{each.server_address[1]}" for each in (server, garbage))
        monkeypatch.setattr(fashion_mnist, "MIRRORS", (f"{portal}/", f"{base}/wrong/", f"{base}/"))
        assert len(load().labels) == 60_000
        assert len(asked) == 8
        fashion_mnist._read.cache_clear()
        assert len(load().labels) == 60_000
        assert len(asked) == 8  # the second time nothing is asked for
        server.shutdown()
        garbage.shutdown()
    assert sorted(os.listdir(fashion_mnist.cache())) == sorted(f"{name}.gz" for name in CONTENT)


def test_ci_has_the_data():
    """Tests that need the data set must not be skipped in silence where all of them are meant to run."""
    if os.environ.get("CI") and (Path(__file__).parents[3] / "shared").is_dir():
        assert DATA.is_dir()
