"""Which convolutions torch uses on a CPU: for many small kernels its own beat those of oneDNN and NNPACK."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_users = 0
_before = (True, True)
_switches: Any = torch.backends  # oneDNN's and NNPACK's, which torch has not annotated


@contextmanager
def torchs_own() -> Iterator[None]:
    """Without oneDNN and NNPACK, which are switches of the whole process: the last thread to leave restores them."""
    global _users, _before
    with _lock:
        if _users == 0:
            _before = _switches.mkldnn.enabled, _switches.nnpack.set_flags(False)[0]
            _switches.mkldnn.enabled = False
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _switches.mkldnn.enabled = _before[0]
                _switches.nnpack.set_flags(_before[1])
