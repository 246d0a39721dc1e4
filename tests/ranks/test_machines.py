"""docs/crew.md, command by command, on three machines: network namespaces on a switch, with a folder each."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

GUIDE = (Path(__file__).parents[2] / "docs" / "crew.md").read_text()
SCRIPT = re.search(r"```py\n(import torch\n.*?)```", GUIDE, re.S)[1]
MINE = f"k{os.getpid()}"  # names of this run: others may run beside it, or have left some behind
SWITCH, NETWORK, REGISTRY = f"{MINE}-sw", "10.78.0", "10.78.0.1:4711"
FORBIDDEN = "not permitted|not supported|Unknown device type"  # what ip says where there are no such machines

pytestmark = pytest.mark.soak


def ip(words, check=True):
    return subprocess.run(["ip", *words.split()], check=check, capture_output=True, text=True)


class Machine:
    def __init__(self, number, prepared, folder):
        self.number, self.prepared, self.folder = number, prepared, folder / str(number)
        self.name, self.member = f"{MINE}-m{number}", None
        self.folder.mkdir()
        (self.folder / "train.py").write_text(SCRIPT)

    def plug_in(self):
        ip(f"netns add {self.name}")
        ip(f"link add {self.name} type veth peer name eth0 netns {self.name}")
        ip(f"link set {self.name} master {SWITCH} up")
        for words in ("link set lo up", f"addr add {NETWORK}.{self.number}/24 dev eth0", "link set eth0 up"):
            ip(f"-n {self.name} {words}")

    def unplug(self):
        ip(f"netns del {self.name}", check=False)
        ip(f"link del {self.name}", check=False)

    def klatsch(self, *words):
        inside = ("ip", "netns", "exec", self.name, sys.executable, "-m", "klatsch")
        return self.prepared.program(*inside, *words, cwd=self.folder)

    def join(self):
        self.member = self.klatsch("crew", "join", REGISTRY, "--token-file", "token", "--", sys.executable, "train.py")

    def serve(self):
        registry = self.klatsch("crew", "serve", "--token-file", "token")
        wait_until(lambda: "klatsch crew join" in registry.stdout, registry)
        return registry

    def status(self):
        done = self.klatsch("crew", "status", REGISTRY, "--token-file", "token", "--json").done()
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["members"]

    def sees(self, *machines):
        """Wait until these train, and know their loss; returns their ids."""
        wanted = {f"{NETWORK}.{machine.number}" for machine in machines}

        def trained():
            rows = [row for row in self.status() if row["state"] == "trains" and "loss" in row]
            return {row["address"]: row["member"] for row in rows}

        return wait_until(lambda: (now := trained()).keys() == wanted and now)


@pytest.fixture
def machines(prepared, tmp_path):
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("machines need root and ip")
    switch = ip(f"link add {SWITCH} type bridge", check=False)
    if re.search(FORBIDDEN, switch.stderr):
        pytest.skip(f"no network namespaces here: {switch.stderr}")
    switch.check_returncode()
    some = [Machine(k, prepared, tmp_path) for k in (1, 2, 3)]
    try:
        ip(f"link set {SWITCH} up")
        for machine in some:
            machine.plug_in()
        yield some
    finally:
        for machine in some:
            machine.unplug()
        ip(f"link del {SWITCH}", check=False)


def test_what_the_guide_says(machines):
    one, two, three = machines
    registry = one.serve()
    for machine in (two, three):
        shutil.copy(one.folder / "token", machine.folder)
    for machine in machines:
        machine.join()
    two.sees(one, two, three)
    three.member.send_signal(signal.SIGTERM)
    assert three.member.done().returncode == 0, three.member.stderr
    three.join()
    two.sees(one, two, three)
    two.member.kill()
    two.member.done()
    two.sees(one, three)
    two.join()
    before = one.sees(one, two, three)
    ip(f"link set {three.name} down")
    one.sees(one, two)
    ip(f"link set {three.name} up")
    after = one.sees(one, two, three)
    assert {address for address in after if after[address] != before[address]} == {f"{NETWORK}.3"}
    registry.kill()
    registry.done()
    registry = one.serve()
    assert two.sees(one, two, three) == after
    dropped = two.klatsch("crew", "drop", after[f"{NETWORK}.3"], REGISTRY, "--token-file", "token").done()
    assert dropped.returncode == 0, dropped.stderr
    assert three.member.done().returncode == 1
    assert "it was dropped by klatsch crew drop" in three.member.stderr
    two.sees(one, two)
    for machine in (one, two):
        machine.member.send_signal(signal.SIGTERM)
    assert [machine.member.done().returncode for machine in (one, two)] == [0, 0]
    wait_until(lambda: not one.status(), registry)
