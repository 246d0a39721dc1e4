"""`klatsch watch` without a browser: who gets the page, what is sent, and what is refused."""

import http.client
import json
import os
import re
import signal
import socket
import threading

import pytest

from klatsch.watch import server
from klatsch.watch.server import Feed, PageServer
from tests.support.waiting import HANG, wait_until


@pytest.fixture
def serve():
    """Start a page in this process; gives its server."""
    started = []

    def start(host="127.0.0.1", **facts):
        started.append(PageServer(host, 0, {"title": "a", **facts}))
        threading.Thread(target=started[-1].serve_forever, args=(0.01,), daemon=True).start()
        return started[-1]

    yield start
    for one in started:
        one.feed.close()
        one.shutdown()
        one.server_close()


def get(page, path="/", method="GET", host=None, **headers):
    """The answer to a request: its code, headers and content."""
    line = http.client.HTTPConnection("127.0.0.1", page.server_port, timeout=HANG)
    line.request(method, path, headers={"Host": host or f"127.0.0.1:{page.server_port}", **headers})
    answer = line.getresponse()
    return answer.status, answer.headers, answer.read().decode()


def stream(page, **headers):
    """An open stream of events."""
    line = http.client.HTTPConnection("127.0.0.1", page.server_port, timeout=HANG)
    line.request("GET", "/events", headers=headers)
    return line.getresponse()


def told(answer, kind="events"):
    """The next message of a kind."""
    while answer.readline() != f"event: {kind}\n".encode():
        pass
    return json.loads(answer.readline().removeprefix(b"data: "))


def rounds(count, member="0", start=0):
    return [{"event": "round", "time": float(k), "member": member, "round": k} for k in range(start, start + count)]


def test_the_page_loads_nothing_from_elsewhere(serve):
    page = serve()
    code, headers, html = get(page)
    assert (code, headers["X-Content-Type-Options"]) == (200, "nosniff")
    assert "default-src 'none'; script-src 'self'" in headers["Content-Security-Policy"]
    named = re.findall(r'(?:src|href)="([^"#]+)"', html)
    assert len(named) == 5
    for name in named:
        assert name == "data:," or get(page, f"/{name}")[0] == 200
    assert not re.search(
        r"https?://(?!www\.w3\.org/2000/svg)", html + get(page, "/watch.js")[2] + get(page, "/watch.css")[2]
    )


@pytest.mark.parametrize("path", ["/../server.py", "/watch.js/..", "//etc/passwd", "/index.html%00", "/LICENSE"])
def test_nothing_else_is_given_out(path, serve):
    assert get(serve(), path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_it_is_read_only(method, serve):
    assert get(serve(), method=method)[0] == 501


def test_names_that_were_made_to_point_here_are_refused(serve):
    page = serve()
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
        assert get(page, host=host or " ")[0] == 403
    for host in ("localhost", f"localhost:{page.server_port}", "127.0.0.1", "[::1]:80", socket.gethostname()):
        assert get(page, host=host)[0] == 200


def test_another_site_gets_no_events(serve):
    page = serve()
    assert get(page, "/events", **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert get(page, "/watch.js", **{"Sec-Fetch-Site": "same-origin"})[0] == 200
    assert get(page, "/", **{"Sec-Fetch-Site": "cross-site"})[0] == 200  # a link to it


def test_beyond_this_machine_the_page_needs_its_token(serve):
    page = serve("0.0.0.0")
    token = page.url().partition("?token=")[2]
    assert len(token) >= 32
    assert not serve().token
    for path in ("/", "/events", "/watch.js", "/?token=", f"/?token={token[:-1]}", "/?token=%C3%A4"):
        code, headers, text = get(page, path)
        assert (code, headers["Set-Cookie"]) == (403, None)
        assert "with its token" in text
    code, headers, _ = get(page, f"/?token={token}")
    assert (code, headers["Location"]) == (303, "/")  # the token leaves the address
    cookie, *attributes = headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Lax"} <= {*attributes}
    assert get(page, Cookie=cookie)[0] == 200
    assert get(page, Cookie=cookie[:-1])[0] == get(page, Cookie="]=;,")[0] == 403
    assert told(stream(page, Cookie=cookie), "hello")["title"] == "a"


def test_events_come_to_those_who_are_there_and_those_who_come_later(serve):
    page = serve()
    early = stream(page)
    told(early, "hello")
    page.feed.add(rounds(2))
    assert [event["round"] for event in told(early)] == [0, 1]
    page.feed.add(rounds(1, start=2))
    assert [event["round"] for event in told(early)] == [2]
    assert [event["round"] for event in told(stream(page))] == [0, 1, 2]
    page.feed.add([], "no registry answers")
    assert told(early, "trouble") == "no registry answers"
    page.feed.add([])
    assert told(early, "trouble") == ""


def test_a_page_that_has_missed_something_begins_anew(serve, monkeypatch):
    monkeypatch.setattr(server, "RECENT", 10)
    page = serve()
    open_ = stream(page)
    told(open_, "now")  # it knows what there was
    with page.feed._news:  # the page cannot look before all of them are there
        for event in rounds(30):
            page.feed.add([event])
    told(open_, "hello")
    assert [event["round"] for event in told(open_)] == [*range(30)]


def test_pages_are_bounded(serve, monkeypatch):
    monkeypatch.setattr(server, "PAGES", 2)
    page = serve()
    streams = [stream(page) for _ in range(2)]
    for one in streams:
        told(one, "hello")
    assert "too many pages are open" in get(page, "/events")[2]
    assert get(page)[0] == 200
    streams[0].close()

    def fits():
        page.feed.add(rounds(1))  # whoever is gone is noticed
        return (answer := stream(page)).status == 200 and told(answer, "hello")

    wait_until(fits)


def test_what_is_kept_is_bounded_and_has_both_ends(monkeypatch):
    monkeypatch.setattr(server, "KEPT", 100)
    monkeypatch.setattr(server, "OTHERS", 5)
    feed = Feed()
    for k in range(10):
        feed.add([*rounds(500, start=500 * k), {"event": "skipped", "time": 500.0 * k, "member": "0"}])
    count, texts = feed.so_far()
    events = [json.loads(text) for text in texts]
    kept = [event["round"] for event in events if event["event"] == "round"]
    assert count == 5010
    assert len(kept) <= 100
    assert (kept[0], kept[-1]) == (0, 4999)
    assert sum(event["event"] == "skipped" for event in events) == 5
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)


def test_whatever_events_hold_pages_can_read_it():
    feed = Feed()
    odd = {
        "event": "round",
        "time": 1.0,
        "member": "\ud800",
        "loss": float("nan"),
        "waits": {"a": float("inf"), "b": [1]},
    }
    feed.add([odd | {"deep": [[[{}]]], "long": "x" * 10_000, "many": list(range(10_000))}])
    (text,) = feed.so_far()[1]
    event = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert (event["member"], event["loss"], event["waits"]["a"]) == ("?", "nan", "inf")
    assert len(text) < 50_000


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, message",
    [
        ("nowhere/log", "there is no folder or store nowhere/log; give one, or the HOST:PORT of a crew's registry"),
        ("nowhere", "there is no folder or store nowhere; give one, or the HOST:PORT of a crew's registry"),
        ("none.sqlite", "there is no store none.sqlite"),
        ("text.txt", "file is not a database"),
        ("127.0.0.1:1", "no registry answers (127.0.0.1:1: Connection refused); check the address"),
        ("here:port", "there is no folder or store here:port"),
        ("127.0.0.1:1 --token-file none", "there is no token file none"),
        ("runs", "runs is no log, but holds some; give one of runs/a, runs/b"),
        (". --port 70000", "--port 70000: give a port from 1 to 65535, or 0 for any"),
        (". --host 192.0.2.1", "cannot listen on 192.0.2.1:4712: "),
    ],
)
def test_what_is_refused(words, message, run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("abc\n")
    for log in ("a", "b"):
        (tmp_path / "runs" / log).mkdir(parents=True)
        (tmp_path / "runs" / log / "0.jsonl").touch()
    code, out, err = run_cli("watch", "--no-open", *words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_port_that_is_in_use_is_one_line(run_cli, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = run_cli("watch", tmp_path, "--port", taken.getsockname()[1])
    assert (code, err.count("\n")) == (2, 1)
    assert "Address already in use; give another --host or --port (0: any)" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(number, start, tmp_path):
    process = start("watch", tmp_path, "--port", 0, "--no-open")
    url = wait_until(lambda: re.search(r"http://127.0.0.1:(\d+)/ until Ctrl-C\n", process.stdout), process)
    line = http.client.HTTPConnection("127.0.0.1", int(url[1]), timeout=HANG)
    line.request("GET", "/events")  # a page that is open
    assert told(line.getresponse(), "hello")["title"] == str(tmp_path)
    os.kill(process.pid, number)
    process.done()
    assert (process.returncode, process.stderr) == (0, "")
