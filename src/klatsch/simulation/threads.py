"""Threads for native code, in which torch starts no threads of its own."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch


def quiet_threads(count: int) -> ThreadPoolExecutor:
    """A pool whose threads do not let torch use further ones: those would spin for a while after each operation."""
    usual = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
    list(pool.map(int, range(count)))
    torch.set_num_threads(usual)  # the setting is one thread's own, except that new threads take the latest
    return pool


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
