"""Worker processes: real ones, really killed."""

import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
def crew_of():
    """Makes crews, which are ended after the test."""
    crews = []

    def make(count, task):
        crews.append(Pool(count, task))
        return crews[-1]

    yield make
    for crew in crews:
        crew.close()
    for crew in crews:
        assert not [worker for worker in crew._workers if worker._process.is_alive()]


def test_results_belong_to_what_was_asked(crew_of):
    crew = crew_of(2, double)
    with ThreadPoolExecutor(2, initializer=no_ctrl_c) as threads:
        assert list(threads.map(crew.work, range(20))) == [2 * number for number in range(20)]


def test_a_killed_worker_is_replaced_and_the_others_go_on(crew_of, tmp_path):
    crew, file = crew_of(1, pid_of), tmp_path / "pid"
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(crew.work, file)
        wait_until(lambda: file.exists() and file.read_text())
        os.kill(first := int(file.read_text()), signal.SIGKILL)
        assert result.result(HANG) != first


def test_workers_killed_while_they_start_are_replaced(crew_of):
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
            crew = crew_of(4, double)
            with ThreadPoolExecutor(4) as threads:
                assert list(threads.map(crew.work, range(8))) == [2 * number for number in range(8)]
            crew.close()
        finally:
            over.set()
            killer.join()


def test_an_error_of_the_task_arrives_with_its_traceback(crew_of):
    crew = crew_of(1, fail)
    with pytest.raises(ValueError, match="in the task") as raised:
        crew.work("plain")
    assert "in fail" in raised.value.__notes__[0]
    # A library such as Dask may have taught pickle to bring the second one through.
    for kind, text in (("local", "cannot be pickled"), ("two words", "cannot be pickled back")):
        with pytest.raises((RuntimeError, TwoWordsError), match=text) as raised:
            crew.work(kind)
        assert "in fail" in raised.value.__notes__[0]


def test_one_that_cannot_be_replaced_is_a_loss(crew_of, monkeypatch):
    crew = crew_of(1, double)
    monkeypatch.setattr(crew, "_start", lambda: (_ for _ in ()).throw(BlockingIOError("no room")))
    (worker,) = crew._workers
    os.kill(worker._process.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(ValueError, match="worker processes died 6 times in a row"):
            crew.work(1)


def test_ctrl_c_while_workers_start_ends_them(python):
    """A plain script: it must not wait for workers that wait for it."""
    script = (
        "import signal\nfrom klatsch.study import workers\nfrom tests.study.test_workers import double\n"
        "usual = workers._Worker.__init__\n"
        "def start(self, task):\n    usual(self, task)\n    signal.raise_signal(signal.SIGINT)\n"
        "workers._Worker.__init__ = start\nworkers.Pool(2, double)\n"
    )
    done = python("-c", script, cwd=Path(__file__).parents[2]).done()
    assert done.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in done.stderr


def test_nothing_is_begun_after_stop(crew_of):
    crew = crew_of(1, double)
    crew.stop()
    with pytest.raises(KeyboardInterrupt):
        crew.work(1)
    with pytest.raises(KeyboardInterrupt):
        crew._start()


def test_stop_reaches_what_runs(crew_of, tmp_path):
    crew, begun = crew_of(2, until_stopped), [tmp_path / "a", tmp_path / "b"]
    with ThreadPoolExecutor(2) as threads:
        results = [threads.submit(crew.work, file) for file in begun]
        wait_until(lambda: all(file.exists() for file in begun))
        crew.stop()
        for result in results:
            with pytest.raises(KeyboardInterrupt):
                result.result(HANG)
