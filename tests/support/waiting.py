"""Waiting for what happens, however long it takes: tests measure no time."""

import time

HANG = 1800  # seconds after which something is taken to hang: far beyond what a slow or busy machine needs


def wait_until(happened, *processes):
    """Wait until a function gives something true, and return it; a process that ends ends the waiting, too."""
    deadline = time.monotonic() + HANG
    while not (found := happened()):
        codes = [process.poll() for process in processes]
        assert not any(code is not None for code in codes) or happened(), f"{codes}: one ended before"
        assert time.monotonic() < deadline, f"nothing happened in {HANG} s"
        time.sleep(0.01)
    return found
