"""Labelled images, and Fashion-MNIST (Xiao et al. 2017, MIT licence): found here or downloaded, always verified.

It is looked for in the given folder, in $KLATSCH_DATA, in the user's cache, and where the Debian package
dataset-fashion-mnist puts it; else it is downloaded into the cache. The SHA-256 of the decompressed content is
checked, since compressed files differ between mirrors.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import urllib.request
import zlib
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from klatsch.arguments import kind_of
from klatsch.files import folder_for, save

VARIABLE = "KLATSCH_DATA"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
MIRRORS = (
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)
CONTENT = {  # SHA-256 of the decompressed files
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
SAMPLES, TEST_SAMPLES = 60_000, 10_000
LARGEST = 60_000_000  # bytes of a file, decompressed
SECONDS = 60.0  # to wait for a mirror
CLASSES = (
    *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)


class Images(NamedTuple):
    """Labelled images, to learn from and to test on."""

    images: Tensor  # (samples, channels, height, width), uint8 from 0 to 255, or floating point
    labels: Tensor  # (samples,), int64 from 0 up
    test_images: Tensor
    test_labels: Tensor

    def check(self) -> None:
        """Refuse images and labels that do not fit each other."""
        for tensor in self:
            if not isinstance(tensor, Tensor):
                raise ValueError(f"images or labels are {type(tensor)}; give tensors, such as torch.from_numpy(array)")
        for images, labels in ((self.images, self.labels), (self.test_images, self.test_labels)):
            if images.ndim != 4 or labels.shape != images.shape[:1] or not len(labels):
                raise ValueError(
                    f"images of shape {tuple(images.shape)} with labels of shape {tuple(labels.shape)}; give images as "
                    "(samples, channels, height, width) and one label for each"
                )
            if images.is_floating_point() and not torch.isfinite(images).all():
                raise ValueError("the images have pixels that are not finite; give finite numbers only")
            if labels.dtype != torch.int64 or labels.min() < 0:
                raise ValueError(f"labels are {labels.dtype} from {labels.min().item()}; give torch.int64 from 0 up")
        if self.images.shape[1:] != self.test_images.shape[1:]:
            raise ValueError(
                f"images to learn from are {tuple(self.images.shape[1:])}, those to test on "
                f"{tuple(self.test_images.shape[1:])}; give both the same shape"
            )

    def scale(self) -> tuple[float, float]:
        """What to subtract from pixels, then multiply them by, for mean 0 and variance 1."""
        if self.images.dtype == torch.uint8:  # by counting: no copy in another dtype
            counts = torch.bincount(self.images.flatten(), minlength=256).double()
            values = torch.arange(256, dtype=torch.float64)
            mean = (counts @ values) / counts.sum()
            deviation = ((counts @ (values - mean).square()) / counts.sum()).sqrt()
        else:
            mean, deviation = self.images.double().mean(), self.images.double().std(correction=0)
        return float(mean), 1.0 / max(float(deviation), 1e-12)


def remedy() -> str:
    """The ways to get the data set, in words."""
    return (
        f"put its four files into {cache()}, give their folder with --data (or data=) or in the environment variable "
        f"{VARIABLE}, or install the Debian package dataset-fashion-mnist"
    )


def load(folder: str | Path | None = None, download: bool = True) -> Images:
    """Fashion-MNIST: 60,000 images of 28 by 28 pixels to learn from, 10,000 to test on, in ten classes.

    Args:
        folder: where the four files are, packed (.gz) or not; found as described above by default.
        download: whether to fetch them if they are missing.
    """
    return _read(find(folder, download))


def find(folder: str | Path | None = None, download: bool = True) -> Path:
    """The folder of the data set, see `load`; its files are not checked yet."""
    if folder is not None and not isinstance(folder, str | Path):
        raise ValueError(f"data is {kind_of(folder)}; give Images, the name of a folder, or None to look for it")
    if given := folder or os.environ.get(VARIABLE):
        source = f"{'--data' if folder else f'${VARIABLE}'} = {given}"
        if not Path(given).is_dir():
            raise ValueError(f"{source} is not a folder; {remedy()}")
        if missing := _missing(Path(given)):
            raise ValueError(f"{source} has no {missing[0]}.gz; {remedy()}")
        return Path(given)
    for place in (cache(), DEBIAN):
        if not _missing(place):
            return place
    if not download:
        raise ValueError(f"Fashion-MNIST is not on this machine; {remedy()}")
    folder_for("Fashion-MNIST", cache(), remedy())
    for name in _missing(cache()):
        save(cache() / f"{name}.gz", gzip.compress(_fetched(name), compresslevel=1, mtime=0), "gzip")
    return cache()


def cache() -> Path:
    """The folder of the user's cache that downloads go to."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "klatsch" / "fashion-mnist"


@lru_cache(maxsize=1)
def _read(folder: Path) -> Images:
    tensors = []
    for name in CONTENT:
        path = next(filter(Path.is_file, _places(folder, name)), folder / f"{name}.gz")
        try:
            content = bytearray(_verified(path.read_bytes(), name, str(path)))
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}; {remedy()}") from None
        data = torch.frombuffer(content, dtype=torch.uint8)
        # The content is known, so its header can be skipped: 16 bytes before images, 8 before labels.
        tensors.append(data[16:].view(-1, 1, 28, 28) if "images" in name else data[8:].long())
    return Images(*tensors)


def _places(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.gz", folder / name


def _missing(folder: Path) -> list[str]:
    return [name for name in CONTENT if not any(map(Path.is_file, _places(folder, name)))]


def _verified(data: bytes, name: str, source: str) -> bytes:
    """The decompressed content of a file."""
    content = data
    if data[:2] == b"\x1f\x8b":
        unpacker = zlib.decompressobj(wbits=31)
        try:
            content = unpacker.decompress(data, LARGEST)  # no more, whatever a file claims
            if not unpacker.eof:
                raise EOFError("it is too large" if unpacker.unconsumed_tail else "its end is missing")
        except (EOFError, zlib.error) as error:
            reason = f"{source} is damaged or cut off ({error}) and is not used"
            raise ValueError(f"{reason}; replace it, or {remedy()}") from None
    if hashlib.sha256(content).hexdigest() != CONTENT[name]:
        raise ValueError(
            f"{source} is not {name} of Fashion-MNIST (its SHA-256 differs, {len(content):,} bytes) and is not used; "
            f"replace it, or {remedy()}"
        )
    return content


def _fetched(name: str) -> bytes:
    """The content of a file from the first mirror that has it."""
    failures = []
    for mirror in MIRRORS:
        try:
            with urllib.request.urlopen(f"{mirror}{name}.gz", timeout=SECONDS) as answer:
                return _verified(answer.read(LARGEST), name, f"{mirror}{name}.gz")
        except (OSError, HTTPException, ValueError) as error:  # no network, or another file
            reason = getattr(error, "reason", error)  # what urllib wraps
            failures.append(f"{mirror.split('/')[2]}: {str(reason).partition('; ')[0] or type(error).__name__}")
    raise ValueError(
        f"Fashion-MNIST is not on this machine and cannot be downloaded ({', '.join(failures)}); {remedy()}"
    )
