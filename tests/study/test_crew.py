"""Worker processes: real ones, really killed."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from klatsch.study.crew import Crew, no_ctrl_c
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


def fail(kind, stop):
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
        crews.append(Crew(count, task))
        return crews[-1]

    yield make
    for crew in crews:
        crew.end()
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
                    if child.pid not in before and "resource_tracker" not in " ".join(child.cmdline()):
                        child.kill()
                        return

        killer = threading.Thread(target=kill)
        killer.start()
        crew = crew_of(4, double)
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(crew.work, range(8))) == [2 * number for number in range(8)]
        over.set()
        killer.join()


def test_an_error_of_the_task_arrives_with_its_traceback(crew_of):
    crew = crew_of(1, fail)
    with pytest.raises(ValueError, match="in the task") as raised:
        crew.work("plain")
    assert "in fail" in raised.value.__notes__[0]
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        crew.work("local")


def test_stop_reaches_what_runs(crew_of, tmp_path):
    crew, begun = crew_of(2, until_stopped), [tmp_path / "a", tmp_path / "b"]
    with ThreadPoolExecutor(2) as threads:
        results = [threads.submit(crew.work, file) for file in begun]
        wait_until(lambda: all(file.exists() for file in begun))
        crew.stop()
        for result in results:
            with pytest.raises(KeyboardInterrupt):
                result.result(HANG)
