"""Lanes for tests: sockets stand in for NCCL on CPUs, and members that share a GPU say that each has one of its own."""

import os
import queue
import signal
import socket
import struct
import threading
from collections import Counter

import torch

from klatsch.ranks import edges, links

BEGINNING = struct.Struct("=qq")  # how many passages there were before, and the bytes of the message that follows


class Imitation(edges.Lane):
    """Like NCCL, it takes one passage after the other, when both ends are there, and never sees that one is gone."""

    dies_in = None  # the number of a passage in the middle of which this process is killed, or stopped
    dies_of = signal.SIGKILL

    def invitation(self):
        self._server = socket.create_server(("127.0.0.1", 0))
        return str(self._server.getsockname()[1]).encode().ljust(edges.INVITATION)

    def _meet(self, invitation):
        if self.end_of_pair == 0:
            with self._server:
                self._socket = self._server.accept()[0]
        else:
            self._socket = socket.create_connection(("127.0.0.1", int(bytes(invitation))))
        self._socket.settimeout(0.05)
        self._communicator, self._stream, self._done = threading.Event(), queue.SimpleQueue(), 0
        threading.Thread(target=self._run, args=(self._communicator,), daemon=True).start()

    def _start(self, room, message):
        ended = threading.Event()
        self._stream.put((room, message, ended))
        return ended.wait

    def _run(self, aborted):
        while not aborted.is_set():
            try:
                room, message, ended = self._stream.get(timeout=0.05)
            except queue.Empty:
                continue
            data = b"" if message is None else message.numpy().tobytes()
            sending = threading.Thread(target=self._send, args=(aborted, data), daemon=True)
            sending.start()
            number, size = BEGINNING.unpack(self._take(aborted, BEGINNING.size) or BEGINNING.pack(self._done, -1))
            if (heard := self._take(aborted, size)) is not None:
                assert (number, size) == (self._done, 0 if room is None else len(room)), "another order"
                if room is not None:
                    room.copy_(torch.frombuffer(bytearray(heard), dtype=torch.uint8))
            sending.join()
            self._done += 1
            ended.set()
        while not self._stream.empty():
            self._stream.get()[2].set()
        self._socket.close()

    def _send(self, aborted, data):
        data, half = BEGINNING.pack(self._done, len(data)) + data, len(data) // 2
        if self._done == self.dies_in:
            Imitation.dies_in = None  # once, whatever lane comes first
            self._put(aborted, data[:half])
            os.kill(os.getpid(), self.dies_of)
            data = data[half:]
        self._put(aborted, data)

    def _put(self, aborted, data):
        while data and not aborted.is_set():
            try:
                data = data[self._socket.send(data) :]
            except OSError:  # the other end is gone, or has no room: it waits, whatever it is
                aborted.wait(0.01)

    def _take(self, aborted, size):
        """So many bytes; None once it is aborted."""
        data = b""
        while len(data) < size or size < 0:
            if aborted.is_set():
                return None
            try:
                more = self._socket.recv(max(size - len(data), 0))
            except OSError:
                more = b""
            data += more
            if not more:
                aborted.wait(0.01)
        return data

    def fault(self):
        return self.broken

    def _let_go(self, aborted):
        aborted.set()


def use_lanes(kind, gpu=None, dies_in=None, dies_of=signal.SIGKILL):
    """Have lanes in this process: imitated, or NCCL's, which takes several processes on one GPU for several hosts."""
    gpu = gpu or f"here/GPU of {os.getpid()}"
    links.gpu_of = lambda device: gpu
    if kind == "imitated":
        edges.Lane = Imitation
        Imitation.dies_in, Imitation.dies_of = dies_in, signal.Signals(dies_of)
        return
    os.environ |= {"NCCL_HOSTID": f"host-of-{os.getpid()}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    usual, begun = edges.Lane._start, Counter()

    def start(self, room, message):
        runs = usual(self, room, message)
        begun[self] += 1
        if begun[self] == dies_in and not begun["the end"]:  # once, whatever lane comes first
            begun["the end"] += 1
            os.kill(os.getpid(), signal.Signals(dies_of))
        return runs

    edges.Lane._start = start
