"""A crew that is disturbed while it trains: members are killed, stopped, slowed and cut off, leave and join.

Run: .venv/bin/python benchmarks/chaos.py [--members 8] [--events 200] [--seed 1] [--log chaos.jsonl]

A small LeNet learns Fashion-MNIST. As root, every member has a network namespace of its own, as if it were a machine on
a switch, so that it can lose its power (nothing says goodbye), its link or a part of the network; without, all are on
the loopback interface. What happened goes to the log, one JSON object per line. Then the same number of rounds runs
undisturbed. The exit code is 1 if something hung, ended with a wrong exit code, broke an invariant of the rule, or if
the loss is more than 2 % above that of the undisturbed run, or models end more than 1.5 times as far apart as there.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from klatsch import ElasticSampler, Gossip, rules
from klatsch.files import token_of
from klatsch.problems import fashion_mnist
from klatsch.wire.carried import Handover
from klatsch.wire.rehearsal import Rehearsal

PORT, NETWORK, NEW_NETWORK = 4711, "10.77.0", 0x40000000
TIMEOUT, PATIENCE = 3.0, 10.0  # seconds of silence after which a member is out, and those that a neighbour may take
HANG = 90.0  # seconds without a round that end the benchmark
BATCH = 128  # samples per round, of the whole crew
LONG = 2.0  # seconds of a round that the log tells of
LAST = 100  # rounds after the last event
TOLERANCE, TESTS = 0.02, 2000  # of the loss, on so many images
APART = 1.5  # times the distance of members' models from their mean that the undisturbed run ends with, at most
# Columns of the board, by slot: of a member, of its epoch; when all shall end (in row 0); how slow it shall be.
ROUND, WHEN, EPOCH, SIZE, END, SLOW = COLUMNS = range(6)


class Wrong(Exception):  # noqa: N818
    """Something that must not happen."""


# --- a member ---------------------------------------------------------------------------------------------------------


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 12, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(192, 48), nn.ReLU(), nn.Linear(48, 10),
    )  # fmt: skip


def member(given: argparse.Namespace, data: fashion_mnist.Images, slot: int, board: Any, record: Path) -> float:
    """Train until all shall end; returns the loss on test images."""
    model, rule = model_of(), rules.make(given.rule, lr=given.lr)
    optimizer = Gossip(model.parameters(), rule, given.topology, timeout=PATIENCE)
    sampler, epoch = ElasticSampler(len(data.labels), optimizer, batch=BATCH), -1
    batches = iter(sampler)
    with record.open("w", buffering=1) as lines:
        while True:
            newest = optimizer.post.epoch
            now = optimizer.rounds, time.monotonic(), newest.number, len(newest.members)
            board[slot, : len(now)] = now
            if newest.number != epoch:  # what must add up, before the first round of an epoch
                epoch = newest.number
                lines.write(json.dumps({"epoch": epoch, "of": len(newest.members)} | sums(optimizer)) + "\n")
            if 0 < board[0, END] <= optimizer.rounds:
                break
            batch = next(batches, None)
            if batch is None:
                batches = iter(sampler)
                continue
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.images[batch] / 255), data.labels[batch]).backward()
            time.sleep(board[slot, SLOW])
            optimizer.step()
    optimizer.finish()
    with torch.no_grad(), optimizer.averaged():
        torch.save(nn.utils.parameters_to_vector(model.parameters()), record.with_suffix(".pt"))
        return float(nn.functional.cross_entropy(model(data.test_images[:TESTS] / 255), data.test_labels[:TESTS]))


def sums(optimizer: Gossip) -> dict[str, Any]:
    """What this member holds of all that adds up over the crew: sums of flows along some directions, and weights."""
    (state,), few = optimizer.vectors(), torch.zeros(7)
    handover = Handover(optimizer.given, Rehearsal(optimizer.given, few))
    chance = torch.Generator().manual_seed(0)
    along = {name: torch.randn(4, state[name].numel(), generator=chance) @ state[name] for name in handover.sums}
    sizes = [float(state[name].norm()) for name in handover.sums]
    weight = [float(state[name]) for name in handover.pushed[:1]]
    return {"zero": [v for values in along.values() for v in values.tolist()], "size": sum(sizes), "weight": weight}


# --- the network ------------------------------------------------------------------------------------------------------


def ip(*words: object, inside: int | None = None, check: bool = True) -> None:
    """The command ip, maybe in the network namespace of a process."""
    enter = ["nsenter", f"--net=/proc/{inside}/ns/net"] if inside else []
    subprocess.run([*enter, "ip", *map(str, words)], check=check, capture_output=True)


def unshared() -> bool:
    """Give this process a network of its own, if it may."""
    return ctypes.CDLL(None).unshare(NEW_NETWORK) == 0


class Switches:
    """Members on two switches: the first one has the registry, the other one is cut off from it."""

    def __init__(self) -> None:
        ip("link", "set", "lo", "up")
        for name, last in (("main", 1), ("other", 2)):
            ip(
                "link", "add", name, "address", f"02:00:00:00:00:0{last}", "type", "bridge"
            )  # it would change with ports
            ip("link", "set", name, "up")
        ip("addr", "add", f"{NETWORK}.1/24", "dev", "main")
        self.registry = f"{NETWORK}.1"

    def attach(self, slot: int, pid: int) -> None:
        """Plug a process in that has unshared its network."""
        ip("link", "del", f"m{slot}", check=False)  # of one that has just died
        mac = f"02:00:00:00:01:{slot:02x}"  # of the machine: others remember whose its IP address is
        ip("link", "add", f"m{slot}", "type", "veth", "peer", "name", "eth0", "address", mac, "netns", pid)
        ip("link", "set", f"m{slot}", "up", "master", "main")
        ip("link", "set", "lo", "up", inside=pid)
        ip("addr", "add", f"{NETWORK}.{10 + slot}/24", "dev", "eth0", inside=pid)
        ip("link", "set", "eth0", "up", inside=pid)

    def move(self, slot: int, switch: str) -> None:
        """Plug a member into a switch."""
        ip("link", "set", f"m{slot}", "master", switch, check=False)

    def unplug(self, slot: int) -> None:
        """Cut a link."""
        ip("link", "set", f"m{slot}", "down", check=False)

    def throttle(self, slot: int, rate: str) -> None:
        """Slow a link down, or no longer."""
        words = ["tc", "qdisc", "del" if not rate else "replace", "dev", f"m{slot}", "root"]
        limit = ["tbf", "rate", rate, "burst", "64kb", "latency", "300ms"] if rate else []
        subprocess.run([*words, *limit], check=False, capture_output=True)


# --- the disturbances -------------------------------------------------------------------------------------------------


class Machine:
    """A machine with a member on it."""

    def __init__(self, slot: int, pid: int) -> None:
        self.slot, self.pid = slot, pid
        self.exit: int | None = None  # the code that it must end with; None while it must not end
        self.told = 0.0  # when that was first seen
        self.disturbed = 0.0  # until when; inf while it is stopped or cut off
        self.started = time.monotonic()  # 0 once it has trained
        self.began = self.took = 0.0  # the round that it was last seen in


class Chaos:
    """A crew, and what is done to it."""

    def __init__(
        self, given: argparse.Namespace, data: fashion_mnist.Images, folder: Path, switches: Switches | None, log: Any
    ) -> None:
        self.given, self.data, self.folder, self.switches, self._log = given, data, folder, switches, log
        self.chance, self.began = random.Random(given.seed), time.monotonic()
        slots = 2 * given.members
        self.board = np.frombuffer(mmap.mmap(-1, 8 * slots * len(COLUMNS))).reshape(slots, -1)
        self.machines: dict[int, Machine] = {}  # by slot
        self.undo: list[tuple[float, Callable[[], None]]] = []
        self.host, self.registry = switches.registry if switches else "127.0.0.1", None
        self.started = 0
        self.last = self.longest_after = "start"  # the last event
        self.longest = 0.0  # seconds that one who was well has taken for a round
        self.joined: list[float] = []  # seconds from the start of a newcomer to its first round
        self.done: Counter[str] = Counter()  # events by kind
        token_of(folder / "token", make=True)
        self.serve()

    def tell(self, **what: object) -> None:
        """Write down what happens."""
        self._log.write(json.dumps({"seconds": round(time.monotonic() - self.began, 3)} | what) + "\n")
        self._log.flush()

    def serve(self) -> None:
        """Start the registry, for the first time or again."""
        words = ["crew", "serve", "--host", self.host, "--port", PORT, "--timeout", TIMEOUT]
        words += ["--token-file", self.folder / "token"]
        words += [] if self.machines else ["--least", self.given.members]
        out = (self.folder / "registry.out").open("a")
        command = [sys.executable, "-m", "klatsch", *map(str, words)]
        self.registry = subprocess.Popen(command, stdout=out, stderr=out)

    # --- members -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a member on a machine that has none."""
        slot = self.chance.choice([slot for slot in range(len(self.board)) if slot not in self.machines])
        self.started += 1
        self.board[slot, [ROUND, WHEN, EPOCH, SIZE, SLOW]] = 0.0, time.monotonic(), 0.0, 0.0, 0.0
        ready, plugged = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            self._become_member(slot, ready[1], plugged[0])
        os.read(ready[0], 1)
        if self.switches is not None:
            self.switches.attach(slot, pid)
        os.write(plugged[1], b".")
        for end in (*ready, *plugged):
            os.close(end)
        self.machines[slot] = Machine(slot, pid)

    def _become_member(self, slot: int, ready: int, plugged: int) -> None:
        code = 1
        try:
            out = os.open(self.folder / f"{self.started}-{slot}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            faulthandler.register(signal.SIGUSR2, all_threads=True)
            if self.switches is not None:
                unshared()
            os.write(ready, b".")
            os.read(plugged, 1)
            os.environ["KLATSCH_CREW"] = f"{self.host}:{PORT}"
            os.environ["KLATSCH_CREW_TOKEN_FILE"] = str(self.folder / "token")
            record = self.folder / f"record-{self.started}-{slot}"
            loss = member(self.given, self.data, slot, self.board, record)
            record.with_suffix(".end").write_text(str(loss))
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def look(self) -> None:
        """Do what is due, and see that all is well."""
        now = time.monotonic()
        for entry in [entry for entry in self.undo if entry[0] <= now]:
            self.undo.remove(entry)
            entry[1]()
        for slot, machine in [*self.machines.items()]:
            pid, status = os.waitpid(machine.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                del self.machines[slot]
                if code != machine.exit:
                    raise Wrong(f"the member on machine {slot} ended with {code} instead of {machine.exit}")
            elif self._is_well(machine, now):
                self._time_round(machine, now)
            if not pid and machine.started and self.board[slot, ROUND] > 0:
                self.joined.append(float(self.board[slot, WHEN]) - machine.started)
                machine.started = 0.0
            if not pid and machine.exit is not None and not self.board[0, END]:
                machine.told = machine.told or now
                if machine.told < now - HANG:
                    raise Wrong(f"the member on machine {slot} does not end")
            if not pid and machine.disturbed < now - HANG and self.board[slot, WHEN] < now - HANG:
                os.kill(machine.pid, signal.SIGUSR2)  # shows where it hangs
                time.sleep(1)
                raise Wrong(f"the member on machine {slot} hangs in round {self.board[slot, ROUND]:.0f}")
        if self.registry is not None and self.registry.poll() is not None:
            raise Wrong(f"the registry ended with {self.registry.returncode}")

    def _time_round(self, machine: Machine, now: float) -> None:
        """Note the longest round of those who are well; long ones are told once they are over."""
        began = float(self.board[machine.slot, WHEN])
        if began != machine.began and machine.took > LONG:
            self.tell(long_round=machine.slot, took=round(machine.took, 2), after=self.last)
        machine.began, machine.took = began, now - began
        if machine.took > self.longest:
            self.longest, self.longest_after = machine.took, self.last

    def wait(self, seconds: float) -> None:
        """Let them train."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.look()
            time.sleep(min(left, 0.05))

    # --- events ------------------------------------------------------------------------------------------------

    def victims(self, most: int) -> list[Machine]:
        """Up to so many members that can be disturbed while most of the others are well, or none."""
        now, newest = time.monotonic(), self.board[self.board[:, EPOCH].argmax()]
        well = [self.machines[slot] for slot in sorted(self.machines) if self._is_well(self.machines[slot], now)]
        well = [machine for machine in well if self.board[machine.slot, EPOCH] == newest[EPOCH]]
        free = min((2 * len(well) - int(newest[SIZE]) - 1) // 2, len(well) - 2)  # more than half of it stay well
        return self.chance.sample(well, most) if most <= free else []

    def _is_well(self, machine: Machine, now: float) -> bool:
        trains = self.board[machine.slot, ROUND] > 0 and self.board[machine.slot, WHEN] > machine.disturbed
        return machine.exit is None and machine.disturbed <= now and bool(trains)

    def disturb(self, seconds: float, victims: list[Machine], undo: Callable[[Machine], None]) -> None:
        """Have members away for some seconds."""

        def over() -> None:
            for machine in victims:
                machine.disturbed = time.monotonic()
                if self.machines.get(machine.slot) is machine:
                    undo(machine)

        for machine in victims:
            machine.disturbed = float("inf")
        self.undo.append((time.monotonic() + seconds, over))

    def event(self) -> bool:
        """Do something to the crew; false if it cannot be done now."""
        kinds = {"kill": 4, "kill two": 1, "leave": 3, "join": 6, "stop": 3, "slow": 2, "registry": 1}
        kinds |= {"power": 2, "throttle": 1, "partition": 1} if self.switches else {}
        kinds = {kind: share for kind, share in kinds.items() if kind in (self.given.kinds or kinds)}
        kind = self.chance.choices([*kinds], [*kinds.values()])[0]
        done = getattr(self, f"_{kind.replace(' ', '_')}")()
        if done is not None:
            self.last = kind
            self.done[kind] += 1
            self.tell(event=kind, machines=done, up=len(self.machines), round=float(self.board[:, ROUND].max()))
        return done is not None

    def _kill(self, most: int = 1, unplug: bool = False) -> list[int] | None:
        victims = self.victims(most)
        for machine in victims:
            if unplug and self.switches:
                self.switches.unplug(machine.slot)
            machine.exit = -signal.SIGKILL
            os.kill(machine.pid, signal.SIGKILL)
        return [machine.slot for machine in victims] or None

    def _kill_two(self) -> list[int] | None:
        return self._kill(2)

    def _power(self) -> list[int] | None:
        return self._kill(1, unplug=True)

    def _leave(self) -> list[int] | None:
        for machine in (victims := self.victims(1)):
            machine.exit = 0
            os.kill(machine.pid, signal.SIGTERM)
        return [machine.slot for machine in victims] or None

    def _join(self) -> list[int] | None:
        if len(self.machines) >= self.given.members:
            return None
        before = {*self.machines}
        self.start()
        return [*self.machines.keys() - before]

    def _stop(self) -> list[int] | None:
        victims = self.victims(1)
        for machine in victims:
            os.kill(machine.pid, signal.SIGSTOP)
        if victims:
            seconds = self.chance.uniform(0.1, 3 * TIMEOUT)
            self.disturb(seconds, victims, lambda machine: os.kill(machine.pid, signal.SIGCONT))
        return [machine.slot for machine in victims] or None

    def _slow(self) -> list[int] | None:
        for machine in (victims := self.victims(1)):
            self.board[machine.slot, SLOW] = self.chance.uniform(0.05, 0.5)
            self.undo.append((time.monotonic() + TIMEOUT, lambda: self.board[:, SLOW].fill(0.0)))
        return [machine.slot for machine in victims] or None

    def _throttle(self) -> list[int] | None:
        assert self.switches is not None
        victims, switches = self.victims(1), self.switches
        for machine in victims:
            switches.throttle(machine.slot, "4mbit")
            self.disturb(TIMEOUT, victims, lambda machine: switches.throttle(machine.slot, ""))
        return [machine.slot for machine in victims] or None

    def _partition(self) -> list[int] | None:
        assert self.switches is not None
        switches, most = self.switches, (len(self.machines) - 1) // 2
        victims = self.victims(self.chance.randint(1, max(most, 1)))
        for machine in victims:
            switches.move(machine.slot, "other")
        if victims:
            seconds = self.chance.uniform(0.1, 3 * TIMEOUT)
            self.disturb(seconds, victims, lambda machine: switches.move(machine.slot, "main"))
        return [machine.slot for machine in victims] or None

    def _registry(self) -> list[int] | None:
        if self.registry is None or not self.victims(1):
            return None
        self.registry.kill()
        self.registry.wait()
        self.registry = None
        self.undo.append((time.monotonic() + self.chance.uniform(0.0, 2 * TIMEOUT), self.serve))
        return []

    # --- the end -----------------------------------------------------------------------------------------------

    def run(self, events: int, rounds: int | None = None) -> dict[str, Any]:
        """Train through so many events; then, or undisturbed, up to a round, with all members."""
        try:
            for _ in range(self.given.members):
                self.start()
            self._until(lambda: bool((self.board[:, ROUND] > 0).sum() == self.given.members), "all to train")
            for machine in self.machines.values():
                machine.started = 0.0
            self.joined.clear()  # the first ones have waited for each other
            for _ in range(events):
                self.wait(self.chance.uniform(0.05, 2 * self.given.pace))
                while not self.event():
                    self.wait(0.1)
            self._until(lambda: not self.undo, "what was stopped")
            self._until(lambda: all(m.exit is None for m in self.machines.values()), "those who leave")
            while len(self.machines) < self.given.members:
                self._join()
            now = time.monotonic()
            self._until(lambda: all(self._is_well(m, now) for m in self.machines.values()), "all to be well")
            last = int(self.board[:, ROUND].max()) + LAST if rounds is None else rounds
            for machine in self.machines.values():
                machine.exit = 0
            self.board[0, END] = last
            self._until(lambda: not self.machines, "all to end", 10 * HANG)
            return self._results(last)
        finally:
            for machine in self.machines.values():
                with suppress(ProcessLookupError):
                    os.kill(machine.pid, signal.SIGKILL)
            if self.registry is not None:
                self.registry.kill()

    def _until(self, done: Callable[[], bool], what: str, seconds: float = HANG) -> None:
        until = time.monotonic() + seconds
        while not done():
            if time.monotonic() > until:
                raise Wrong(f"waited {seconds:.0f} s for {what}")
            self.wait(0.05)

    def _results(self, last: int) -> dict[str, Any]:
        losses = [float(path.read_text()) for path in self.folder.glob("*.end")]
        models = torch.stack([torch.load(path) for path in self.folder.glob("*.pt")])
        apart = (models - models.mean(0)).norm(dim=1) / models.mean(0).norm()
        joined = sorted(self.joined)
        return {
            "events": dict(self.done),
            "rounds": last,
            "loss": round(sum(losses) / len(losses), 4),
            "apart": round(float(apart.max()), 4),
            "longest_round": round(self.longest, 2),
            "longest_after": self.longest_after,
            "joined_after": [round(joined[len(joined) // 2], 2), round(joined[-1], 2)]
            if joined
            else [],  # median, most
            "checked": self._checked(),
        }

    def _checked(self) -> int:
        """How many epochs' sums add up, of those in which all members have taken the first round."""
        epochs: dict[int, list[dict[str, Any]]] = {}
        for path in self.folder.glob("record-*"):
            for line in path.read_text().splitlines() if not path.suffix else ():
                with suppress(ValueError):  # it was killed while it wrote it
                    told = json.loads(line)
                    epochs.setdefault(told["epoch"], []).append(told)
        whole = {epoch: told for epoch, told in epochs.items() if len(told) == told[0]["of"]}
        for epoch, told in whole.items():
            size = sum(own["size"] for own in told)
            for number, total in enumerate(map(sum, zip(*(own["zero"] for own in told), strict=True))):
                if abs(total) > 1e-5 * size + 1e-9:
                    raise Wrong(f"epoch {epoch}: a sum of flows is {total:g} along direction {number}, and not zero")
            for weights in zip(*(own["weight"] for own in told), strict=True):
                if abs(sum(weights) - len(told)) > 1e-4 * len(told):
                    raise Wrong(f"epoch {epoch}: weights of push-sum sum to {sum(weights):g} for {len(told)} members")
        return len(whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pace", type=float, default=0.5, help="mean seconds between two events")
    parser.add_argument("--kinds", nargs="+", help="only these events, for instance: kill join")
    parser.add_argument("--rule", default="d2")
    parser.add_argument("--topology", default="ring")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--log", type=Path, default=Path("chaos.jsonl"))
    parser.add_argument("--loopback", action="store_true", help="no network namespaces")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # imports what torch imports with the first optimizer; members are forked
    data = fashion_mnist.load(None)
    switches = None if given.loopback or not unshared() else Switches()
    with given.log.open("w") as log, tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        results: list[dict[str, Any]] = []
        for events, name in ((given.events, "disturbed"), (0, "undisturbed")):
            (own := Path(folder) / name).mkdir()
            chaos = Chaos(given, data, own, switches, log)
            try:
                results.append(chaos.run(events, results[0]["rounds"] if results else None))
            except Wrong as error:
                chaos.tell(wrong=str(error), said={path.name: path.read_text()[-3000:] for path in own.glob("*.out")})
                sys.exit(f"{error}; see {given.log}")
            chaos.tell(result=name, **results[-1])
            print(name, json.dumps(results[-1]))
        disturbed, calm = results
        worse, apart = disturbed["loss"] / calm["loss"] - 1, disturbed["apart"] / calm["apart"]
        print(f"loss {100 * worse:+.2f} % beside the undisturbed run; models {apart:.2f} times as far apart")
        sys.exit(worse > TOLERANCE or apart > APART)


if __name__ == "__main__":
    main()
