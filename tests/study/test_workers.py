"""Worker processes: real ones, really killed."""

import contextlib
import os
import signal
import threading
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor

import psutil
import pytest

from klatsch.study.workers import Pool, no_ctrl_c
from tests.support.waiting import HANG, wait_until

pytestmark = pytest.mark.processes


def double(number, stop):
    return 2 * number


def pid_of(file, stop):
    """Tell who works on it; the first one works until it is killed."""
    try:
        with open(file, "x") as mine:
            mine.write(str(os.getpid()))
    except FileExistsError:
        return os.getpid()
    signal.pause()


def until_stopped(begun, stop):
    begun.touch()
    stop.wait(HANG)
    raise KeyboardInterrupt


class TwoWordsError(Exception):
    """It can be pickled, but not back."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def fail(kind, stop):
    if kind == "two words":
        raise TwoWordsError("cannot be", "pickled back")
    if kind == "local":

        class MineError(Exception):
            pass

        raise MineError("cannot be pickled")
    raise ValueError("in the task")


@pytest.fixture
def pool_of():
    """Makes pools, which are ended after the test."""
    pools = []

    def make(task):
        pools.append(Pool(task))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
    for pool in pools:
        assert not [process for process, _ in pool._workers.values() if process.is_alive()]


def test_results_belong_to_what_was_asked(pool_of):
    pool = pool_of(double)
    with ThreadPoolExecutor(2, initializer=no_ctrl_c) as threads:
        assert list(threads.map(pool.work, range(20))) == [2 * number for number in range(20)]


def test_a_killed_worker_is_replaced_and_the_others_go_on(pool_of, tmp_path):
    pool, file = pool_of(pid_of), tmp_path / "pid"
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(pool.work, file)
        wait_until(lambda: file.exists() and file.read_text())
        os.kill(first := int(file.read_text()), signal.SIGKILL)
        with pytest.raises(BrokenExecutor):
            result.result(HANG)
        assert threads.submit(pool.work, file).result(HANG) != first


def test_workers_killed_while_they_start_are_replaced(pool_of):
    """The pool of the standard library hangs here now and then."""
    for _ in range(10):
        before = {child.pid for child in psutil.Process().children()}
        over = threading.Event()

        def kill(before=before, over=over):
            while not over.is_set():
                for child in psutil.Process().children():
                    with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                        if child.pid not in before and "resource_tracker" not in " ".join(child.cmdline()):
                            child.kill()
                            return

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            pool = pool_of(double)
            with ThreadPoolExecutor(4) as threads:
                left, losses = set(range(8)), 0
                while left:
                    results = {number: threads.submit(pool.work, number) for number in left}
                    left = {n for n, result in results.items() if isinstance(result.exception(HANG), BrokenExecutor)}
                    assert all(result.result() == 2 * n for n, result in results.items() if n not in left)
                    losses += len(left)
                assert losses <= 1
            pool.close()
        finally:
            over.set()
            killer.join()


def test_an_error_of_the_task_arrives_with_its_traceback(pool_of):
    pool = pool_of(fail)
    with pytest.raises(ValueError, match="in the task") as raised:
        pool.work("plain")
    assert "in fail" in raised.value.__notes__[0]
    # A library such as Dask may have taught pickle to bring the second one through.
    for kind, text in (("local", "cannot be pickled"), ("two words", "cannot be pickled back")):
        with pytest.raises((RuntimeError, TwoWordsError), match=text) as raised:
            pool.work(kind)
        assert "in fail" in raised.value.__notes__[0]


def test_one_that_cannot_be_replaced_is_a_loss(pool_of, monkeypatch):
    pool = pool_of(double)
    assert pool.work(1) == 2
    ((process, _),) = pool._workers.values()
    monkeypatch.setattr(type(process), "start", lambda _: (_ for _ in ()).throw(BlockingIOError("no room")))
    os.kill(process.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(BrokenExecutor):
            pool.work(1)


def test_nothing_is_begun_after_stop(pool_of):
    pool = pool_of(double)
    pool.stop()
    with pytest.raises(KeyboardInterrupt):
        pool.work(1)
    assert not pool._workers


def test_stop_reaches_what_runs(pool_of, tmp_path):
    pool, begun = pool_of(until_stopped), [tmp_path / "a", tmp_path / "b"]
    with ThreadPoolExecutor(2) as threads:
        results = [threads.submit(pool.work, file) for file in begun]
        wait_until(lambda: all(file.exists() for file in begun))
        pool.stop()
        for result in results:
            with pytest.raises(KeyboardInterrupt):
                result.result(HANG)
