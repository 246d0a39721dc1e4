"""One process that has torch loaded: it forks all others that the tests start, and ends them.

To start Python and torch takes seconds; to fork a process that has them takes milliseconds. `Prepared` is the tests'
end of it. Run as a program, `python -m tests.support.prepared FD`, this is the prepared process itself. All that it
forks, and all that those start, are its descendants: it ends them when it is asked to, and when the tests are gone.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import warnings
import weakref
from concurrent.futures import process, thread
from multiprocessing import resource_tracker, util
from pathlib import Path

import psutil

from tests.support.waiting import HANG

ROOT = Path(__file__).parents[2]
LARGEST = 1 << 17  # bytes of a request
DIE_WITH_PARENT, ADOPT_ORPHANS = 1, 36  # of prctl(2)
LIBRARIES = (
    *("torch", "torch.distributed.run", "torch._dynamo", "torch.distributed.fsdp", "torch.onnx", "torch._inductor"),
    *("networkx", "scipy.sparse.linalg", "scipy.stats", "safetensors.torch", "matplotlib.figure", "jinja2", "sqlite3"),
    *("klatsch.cli", "klatsch.optim", "klatsch.report", "klatsch.planning", "klatsch.simulation", "klatsch.study"),
    *("tests.support.rank_scenarios", "tests.support.rank_hardships", "tests.support.rank_points"),
)


def prctl(option, value):
    """Set an attribute of this process; Linux alone knows it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# --- the tests' end -------------------------------------------------------------------------------------------------


class Process:
    """A process that a test has started, much like that of `subprocess`; it leads a session of its own.

    What it prints is collected all the time: `stdout` and `stderr` are what has come so far.
    """

    def __init__(self, pid, words, status, pipes):
        self.pid, self.args, self.returncode = pid, words, None
        self._status = status  # where its exit code will come from
        self._printed = [bytearray(), bytearray()]
        self._readers = [
            threading.Thread(target=self._collect, args=pair, daemon=True)
            for pair in zip(pipes, self._printed, strict=False)
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _collect(pipe, printed):
        while chunk := os.read(pipe, 1 << 16):
            printed += chunk
        os.close(pipe)

    @property
    def stdout(self):
        return self._printed[0].decode()

    @property
    def stderr(self):
        return self._printed[1].decode()

    def poll(self):
        """The exit code, or None while it runs; minus the signal where one has ended it."""
        return self._ended(0)

    def wait(self, timeout=HANG):
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _ended(self, timeout):
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            told = os.read(self._status, 16)
            os.close(self._status)
            self.returncode = int(told) if told else -signal.SIGKILL  # the prepared process has gone, and all with it
        return self.returncode

    def communicate(self, timeout=HANG):
        """Wait until it has ended, and all who could still print to the same place; returns what they printed."""
        self.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
            assert not reader.is_alive(), f"{self.args} has ended, but not all that may print there"
        return self.stdout, self.stderr

    def done(self):
        """Itself, when it has ended."""
        self.communicate()
        return self

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class Prepared:
    """Starts the prepared process, and asks it for others.

    Args:
        fork: whether this process is one itself, of which a copy will do.
    """

    pid = None  # of the prepared process, of which a session has one

    def __init__(self, fork=False):
        self.asks, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.asks.settimeout(HANG)
        self.reserved = []  # sockets that keep ports from others
        self.started = []  # since the last time that all were ended
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
        self.ports = 10_000 + (3_000 * worker + os.getpid() % 2_000) % 20_000  # apart from other sessions, too
        if fork:  # this process is prepared already
            if os.fork() == 0:
                self.asks.close()
                prctl(ADOPT_ORPHANS, 1)
                finish(serve(theirs))
            theirs.close()
            return
        command = [sys.executable, "-m", "tests.support.prepared", str(theirs.fileno())]
        # Libraries that have started threads cannot be forked.
        alone = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | alone | {"PYTHONPATH": path}
        self.server = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, start_new_session=True, stdin=subprocess.DEVNULL
        )
        Prepared.pid = self.server.pid
        theirs.close()

    def python(self, *words, cwd=None, env=None, fresh=False, spawn=False, preload=(), tell=None, prints=True):
        """Start `python WORDS`, as a fork of what is loaded already or, where that is what is tested, afresh.

        Args:
            words: "-m" and a module, "-c" and a program, or a file; and its arguments.
            cwd: where it runs: here, unless told.
            env: its environment: this one's, unless told.
            fresh: whether a new interpreter is started; the first word is then the program to run.
            spawn: whether the workers that it starts by `multiprocessing` are started afresh, and not forked.
            preload: modules that it needs and that take long to load; all later ones find them loaded.
            tell: a file that gets its exit code.
            prints: whether what it prints is collected; else it goes where that of this process goes.
        """
        words = [str(word) for word in words]
        request = {"words": words, "cwd": str(cwd or os.getcwd()), "env": dict(os.environ if env is None else env)}
        request |= {"fresh": fresh, "spawn": spawn, "preload": list(preload), "tell": tell and str(tell)}
        os.umask(mask := os.umask(0))
        request["umask"] = mask
        pipes = [os.pipe(), os.pipe()] if prints else [(None, os.dup(1)), (None, os.dup(2))]
        status, status_end = os.pipe()
        theirs = [os.open(os.devnull, os.O_RDONLY), *(end for _, end in pipes), status_end]
        try:
            answer = self._ask(request, theirs)
        finally:
            for end in theirs:
                os.close(end)
        self.started.append(answer["pid"])
        return Process(answer["pid"], words, status, [pipe for pipe, _ in pipes if pipe is not None])

    def klatsch(self, *arguments, **options):
        """Start the command line."""
        return self.python("-m", "klatsch", *arguments, **options)

    def program(self, *words, **options):
        """Start any program."""
        return self.python(*words, fresh=True, **options)

    def torchrun(self, size, *words, **options):
        """Start torchrun, whose ranks are forked, too, unless `spawn=True`."""
        return self.python("-m", "torch.distributed.run", "--nproc-per-node", size, *words, **options)

    def ranks(self, size, *words, tell=None, **options):
        """Start the processes that torchrun would start, without it; `tell` has a file for each."""
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.free_port()), "WORLD_SIZE": str(size)}
        environment = dict(os.environ) | shared
        own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
        tell = tell or [None] * size
        return [self.python(*words, env=environment | own[rank], tell=tell[rank], **options) for rank in range(size)]

    def free_port(self):
        """A port for a server that sets SO_REUSEADDR, as stores do; nobody else gets it while this process lives."""
        while True:
            self.ports += 1
            self.reserved.append(reserved := socket.socket())
            with contextlib.suppress(OSError):
                reserved.bind(("127.0.0.1", self.ports))
                reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not before: it would share ports
                return self.ports

    def end(self, but=()):
        """End all processes that were started, with all that those have started, but for some of them."""
        if set(self.started) - set(but):
            self._ask({"but": list(but)}, [])
            self.started = list(but)

    def close(self):
        for end in (self.asks, *self.reserved):
            end.close()
        self.server.wait(HANG)

    def _ask(self, request, ends):
        content = json.dumps(request).encode()
        assert len(content) < LARGEST, "raise LARGEST"
        socket.send_fds(self.asks, [content], ends)
        answer = json.loads(self.asks.recv(LARGEST) or b'{"error": "the prepared process has ended"}')
        assert "error" not in answer, answer["error"]
        return answer


@contextlib.contextmanager
def no_workers():
    """Refuse to start workers by `multiprocessing`, in tests that are not marked as starting processes."""

    def refuse(*_):
        raise AssertionError("this test starts processes: mark it with @pytest.mark.processes")

    usual, util.spawnv_passfds = util.spawnv_passfds, refuse
    try:
        yield
    finally:
        util.spawnv_passfds = usual


@contextlib.contextmanager
def forked_workers():
    """Have workers that a test starts by `multiprocessing` forked from the process of the tests."""
    import torch

    if torch.cuda.is_available():  # whose threads and memory a fork does not have
        yield
        return
    usual = fork_workers()
    try:
        yield
    finally:
        util.spawnv_passfds = usual


def end_children():
    """End the processes that this one has started itself, with all that those have started; not the prepared one."""
    spared, found = {Prepared.pid, resource_tracker._resource_tracker._pid}, set()
    for tasks in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended
            found = set(map(int, tasks.read_text().split())) - spared
        for pid in found:
            with contextlib.suppress(psutil.Error):
                child = psutil.Process(pid)
                for process in [child, *child.children(recursive=True)]:
                    process.kill()
                child.wait(HANG)


# --- the prepared process -------------------------------------------------------------------------------------------


def serve(asked):
    """Fork what is asked for; returns in the forked processes alone, with their request."""
    watched = {}  # of every process that was asked for: who is told its exit code
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([asked, woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 1 << 16)
            reap(watched)
        if asked not in ready:
            continue
        content, ends, _, _ = socket.recv_fds(asked, LARGEST, 8)
        if not content:  # the tests have ended, however that was
            end_all(watched)
            os._exit(0)
        request = json.loads(content)
        if "but" in request:
            end_all(watched, set(request["but"]))
            asked.send(b"{}")
            continue
        try:
            for module in request["preload"]:
                importlib.import_module(module)
        except Exception as error:
            asked.send(json.dumps({"error": repr(error)}).encode())
            continue
        if not request["fresh"] and sys.platform == "linux" and len(os.listdir("/proc/self/task")) > 1:
            # A library has started threads, as torch for CUDA does: a copy of this process might hang.
            request |= {"fresh": True, "words": [sys.executable, *request["words"]]}
        if (pid := os.fork()) == 0:
            asked.detach()
            return become(request, ends)
        watched[pid] = (ends.pop(), request["tell"])
        for end in ends:
            os.close(end)
        asked.send(json.dumps({"pid": pid}).encode())


def reap(watched):
    """See who has ended, and tell who wants to know."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            status, tell = watched.pop(found[0], (None, None))
            if status is None:  # an orphan
                continue
            code = str(os.waitstatus_to_exitcode(found[1]))
            if tell is not None and Path(tell).parent.is_dir():
                hidden = Path(tell).with_name(f".{Path(tell).name}")
                hidden.write_text(code)
                hidden.rename(tell)
            with contextlib.suppress(BrokenPipeError):
                os.write(status, code.encode())
            os.close(status)


def end_all(watched, but=frozenset()):
    """End all descendants, but for some and their own."""
    while found := descendants(but):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap(watched)
        select.select([], [], [], 0.001)


def descendants(but):
    children = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    found, left = [], [os.getpid()]
    while left:
        own = [pid for pid in children.get(left.pop(), []) if pid not in but]
        found += own
        left += own
    return found


def become(request, ends):
    """In a fork: be what a new process would be. Signals that a shell has ignored are as usual."""
    os.setsid()
    prctl(DIE_WITH_PARENT, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL if request["fresh"] else signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number, end in enumerate(ends[:3]):
        os.dup2(end, number)
    os.closerange(3, 1 << 10)
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["env"])
    if request["fresh"]:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        try:
            os.execvp(request["words"][0], request["words"])
        except OSError as error:
            os.write(2, f"{request['words'][0]}: {error}\n".encode())
            os._exit(127)
    open_streams()
    if not request["spawn"]:
        fork_workers()
        if request["words"][:2] == ["-m", "torch.distributed.run"]:
            fork_ranks()
    return request["words"]


def run(words):
    """What `python WORDS` does."""
    kind, *arguments = words
    if kind == "-m":
        sys.argv, sys.path[0] = arguments, os.getcwd()
        if not hasattr(sys.modules.get(arguments[0]), "__path__"):
            sys.modules.pop(arguments[0], None)  # else it warns that it was loaded before
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[1:]], ""
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), vars(module))
    else:
        sys.argv, sys.path[0] = words, str(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")


def open_streams():
    """In a fork: read and print where a new process would."""
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", 1, closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)


def fork_workers():
    """Have `multiprocessing` fork from this process the workers that it would start afresh, which takes seconds each.

    They get what they would get afresh, and no more: no open files, no handlers of signals. Returns what started them
    before.
    """
    afresh = util.spawnv_passfds

    def forked(path, words, kept):
        if "spawn_main" not in str(words):  # the resource tracker
            return afresh(path, words, kept)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads: they touch nothing of this
            if pid := os.fork():
                return pid
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        process._threads_wakeups.clear()  # executors of the parent, whose threads and pipes are not here
        thread._threads_queues.clear()
        last = 2
        for end in sorted({*kept, 1 << 10}):
            os.closerange(last + 1, end)
            last = end
        open_streams()
        sys.argv, code = ["-c", os.fsdecode(words[-1])], 1
        try:
            exec(words[-2], {})
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    util.spawnv_passfds = forked
    return afresh


def fork_ranks():
    """Have torchrun fork its ranks from a process that is like it, which it would start afresh, in seconds each."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    prepared = Prepared(fork=True)

    def forked(self, words, environment):
        assert words[:2] == (sys.executable, "-u"), words
        return prepared.python(*words[2:], env=environment, prints=False)

    usual = SubprocessHandler.close

    def close(self, death_sig=None):
        # Who has ended is reaped by the prepared process; torchrun expects a zombie, which can still get signals.
        with contextlib.suppress(ProcessLookupError):
            usual(self, death_sig)

    SubprocessHandler._popen, SubprocessHandler.close = forked, close


def finish(words):
    """Run, and end as an interpreter does, but for taking apart all that was loaded, which would take a second."""
    code = 0
    try:
        run(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def main():
    asked = socket.socket(fileno=int(sys.argv[1]))
    prctl(ADOPT_ORPHANS, 1)
    for module in LIBRARIES:
        importlib.import_module(module)
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # else every fork copies what it looks through
    for finalizer in weakref.finalize._registry:  # of torch's operators, which no fork has to take apart at its end
        finalizer.atexit = False
    finish(serve(asked))


if __name__ == "__main__":
    main()
