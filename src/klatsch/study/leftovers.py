"""Checkpoints beside a store: their names, and what killed processes leave of them."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

from klatsch.study.batches import Batch, pack
from klatsch.study.cases import expand
from klatsch.study.sharing import Share
from klatsch.study.store import Store

STALE = 7 * 86400.0  # seconds after which a checkpoint that nobody went on from is nobody's


def checkpoint(store: Store, batch: Batch) -> Path | None:
    """The file of a batch in progress, beside the store; None for a store in memory."""
    return None if store.path == ":memory:" else Path(f"{store.path}-{batch.key}.safetensors")


def sweep(store: Store, share: Share) -> None:
    """Remove what killed processes left beside the store and nobody can go on from."""
    if store.path == ":memory:":
        return
    place = Path(store.path)
    name = re.compile(rf"\.?{re.escape(place.name)}-([0-9a-f]{{32}})\.safetensors(\.[0-9a-f]+)?")
    found = {file: match for file in place.parent.iterdir() if (match := name.fullmatch(file.name))}
    if not found:
        return
    in_use, unfinished = share.others(), _unfinished(store)
    for file, match in found.items():
        torn = match[2] is not None  # killed while it was written
        with suppress(FileNotFoundError):  # another process was faster
            kept = not torn and time.time() - file.stat().st_mtime < STALE
            if match[1] not in in_use and not (kept and (unfinished is None or match[1] in unfinished)):
                file.unlink()


def _unfinished(store: Store) -> set[str] | None:
    """The batches that studies in a store still have to do, by key; None where that cannot be known."""
    done = store.done()
    try:
        batches = [
            batch
            for remembered in store.studies()
            for batch in pack(expand(remembered.study, remembered.sources)[0], remembered.study.device)
        ]
    except ValueError:  # of another version, or without its data
        return None
    return {left.key for batch in batches for left in batch.without(done)}
