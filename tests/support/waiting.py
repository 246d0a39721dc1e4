"""Waiting for what happens, however long it takes: tests measure no time."""

import time

HANG = 600  # seconds after which one step is taken to hang: ten times the longest one on a busy machine
LONGEST = 1500  # seconds after which a whole test is, whatever it waits for: half an hour of CI is too much


def wait_until(happened, *processes):
    """Wait until a function gives something true, and return it; a process that ends ends the waiting, too."""
    deadline = time.monotonic() + HANG
    while not (found := happened()):
        codes = [process.poll() for process in processes]
        assert not any(code is not None for code in codes) or happened(), f"{codes}: one ended before"
        assert time.monotonic() < deadline, f"nothing happened in {HANG} s"
        time.sleep(0.01)
    return found
