"""Probe files of klatsch plan that no probe wrote: one line each, whatever they are."""

import json
import os

import pytest

from klatsch.planning.sources import read_probe

ESTIMATE = {"value": 1.0, "low": 0.5, "high": 2.0, "samples": 10}
PROBE = dict.fromkeys(("L", "D1", "sigma", "zeta"), ESTIMATE) | {"params": 100, "gradient_seconds": 0.1}


@pytest.mark.parametrize("kind", ["/dev/zero", "a pipe", "a huge file", "deep"])
def test_what_has_no_end_is_refused(kind, start, tmp_path):
    path, says = tmp_path / "probe.json", "is not a plain file, but a device or a pipe"
    if kind == "/dev/zero":
        path = kind
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a huge file":
        with path.open("wb") as file:
            file.truncate(1 << 40)  # without a byte on the disk
        says = "is larger than 1 MiB"
    else:
        path.write_text("[" * 50_000)
        says = "is not JSON; write one with klatsch probe PROBLEM -o FILE"
    done = start("plan", path, "--target", "1e-3").done()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"klatsch: error: {path} {says}")
    assert done.stderr.count("\n") == 1


def written(tmp_path, **changes):
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(PROBE | changes))
    return path


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"params": -1}, "params = -1; give a number from 1 to 1e"),
        ({"params": 1e299}, r"params = 1e\+299; give a number from 1 to 1e\+15"),
        ({"params": 0}, "params = 0; give a number from 1"),
        ({"params": 1.5}, "params = 1.5; give a whole number"),
        ({"params": 10**400}, "holds no number 'params'"),
        ({"gradient_seconds": -0.1}, "gradient_seconds = -0.1; give a number from 1e-50"),
        ({"gradient_seconds": 0}, "gradient_seconds = 0; give"),
        ({"sigma": ESTIMATE | {"value": -1.0}}, "sigma: value = -1; give a number from 0"),
        ({"L": ESTIMATE | {"value": 1e299}}, r"L: value = 1e\+299; give a number from 0 to 1e\+50"),
        ({"D1": ESTIMATE | {"low": 2.0, "high": 0.5}}, "D1 = 1 is not between low = 2 and high = 0.5"),
        ({"zeta": ESTIMATE | {"value": 3.0}}, "zeta = 3 is not between low = 0.5 and high = 2"),
        ({"zeta": ESTIMATE | {"low": float("nan")}}, "holds no number 'zeta: low'"),
    ],
)
def test_what_cannot_have_been_measured_is_refused(changes, says, tmp_path):
    assert read_probe(written(tmp_path)).params == 100
    with pytest.raises(ValueError, match=says):
        read_probe(written(tmp_path, **changes))


def test_the_command_says_it_in_one_line(tmp_path, run_cli):
    path = written(tmp_path, params=-1)
    code, out, err = run_cli("plan", path, "--target", "1e-3")
    assert (code, out) == (2, "")
    assert err == (
        f"klatsch: error: {path}: params = -1; give a number from 1 to 1e+15, "
        "or write one with klatsch probe PROBLEM -o FILE\n"
    )
