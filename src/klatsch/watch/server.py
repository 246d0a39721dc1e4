"""The live page: a web server of the standard library that shows events as they come. It only reads."""

from __future__ import annotations

import hmac
import ipaddress
import json
import math
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from urllib.parse import parse_qs, urlsplit

from klatsch.watch.events import Event

PAGE = files("klatsch.watch") / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/watch.css": ("watch.css", "text/css; charset=utf-8"),
    "/watch.js": ("watch.js", "text/javascript; charset=utf-8"),
    "/uPlot.css": ("uPlot.min.css", "text/css; charset=utf-8"),
    "/uPlot.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
PAUSE = 0.3  # seconds between two looks at what is watched
PATIENCE = 10.0  # seconds for a client that does not read or write
SIGN = 5.0  # seconds after which a silent page gets a sign of life
CONNECTIONS, PAGES = 64, 24  # at a time
KEPT = 1200  # rounds of a member for pages that come later; where there are more, every second one is left out
OTHERS, RECENT = 20_000, 50_000  # events of other kinds, and events for pages that are open
BATCH = 2000  # events of a message
LONGEST, MOST = 300, 4096  # characters of a text, entries of a list

Request = socket.socket | tuple[bytes, socket.socket]  # the second for protocols without connections


def clean(event: Event) -> dict[str, object]:
    """An event as pages get it: whatever it holds, numbers are finite, texts short, and nothing is nested deeper."""
    return {_text(name, 64): _clean(value) for name, value in event.items()}


def _clean(value: object) -> object:
    if isinstance(value, Mapping):
        return {_text(name, 64): _plain(entry) for name, entry in list(value.items())[:MOST]}
    return [_plain(entry) for entry in value[:MOST]] if isinstance(value, list | tuple) else _plain(value)


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int) else _text(value, LONGEST)


def _text(value: object, longest: int) -> str:
    return str(value)[:longest].encode(errors="replace").decode()


class Feed:
    """What is known so far, thinned, for pages that come later; and what is new, for those that are open."""

    def __init__(self) -> None:
        self.trouble = ""  # why nothing comes
        self.open = True
        self._rounds: dict[str, list[tuple[float, str]]] = {}  # by member
        self._others: deque[tuple[float, str]] = deque(maxlen=OTHERS)
        self._recent: deque[str] = deque(maxlen=RECENT)
        self._count = 0  # of all events
        self._news = threading.Condition()

    def add(self, events: Sequence[Event], trouble: str = "") -> None:
        """Events that have just come, or why none do."""
        with self._news:
            for event in events:
                text, when = json.dumps(clean(event)), event.get("time")
                entry = float(when) if isinstance(when, int | float) else 0.0, text
                if event.get("event") == "round":
                    rounds = self._rounds.setdefault(str(event.get("member")), [])
                    rounds.append(entry)
                    if len(rounds) > KEPT:
                        del rounds[1:-1:2]
                else:
                    self._others.append(entry)
                self._recent.append(text)
            self._count += len(events)
            if events or trouble != self.trouble:
                self.trouble = trouble
                self._news.notify_all()

    def close(self) -> None:
        with self._news:
            self.open = False
            self._news.notify_all()

    def so_far(self) -> tuple[int, list[str]]:
        """Where a page begins: how many events there were, and those that are kept, in the order of time."""
        with self._news:
            kept = [*self._others, *(entry for rounds in self._rounds.values() for entry in rounds)]
            return self._count, [text for _, text in sorted(kept, key=lambda entry: entry[0])]

    def after(self, seen: int, trouble: str) -> tuple[int, list[str]] | None:
        """Wait for events after the first `seen`, or until trouble changes; None if the page has missed some."""
        with self._news:
            self._news.wait_for(lambda: self._count > seen or self.trouble != trouble or not self.open, SIGN)
            new = self._count - seen
            return None if new > len(self._recent) else (self._count, list(self._recent)[len(self._recent) - new :])


class PageServer(ThreadingHTTPServer):
    """Gives out the page and its events, to a bounded number of clients.

    Args:
        host: where to listen. Beyond this machine, pages need the token that `url` has.
        port: 0 for any.
        facts: what pages show of what is watched, such as its name.
    """

    daemon_threads = True
    request_queue_size = CONNECTIONS

    def __init__(self, host: str, port: int, facts: Event) -> None:
        self.feed, self.facts, self.host = Feed(), clean(facts), host
        self.token = "" if is_local(host) else secrets.token_urlsafe(24)
        self._free, self.pages = threading.BoundedSemaphore(CONNECTIONS), threading.BoundedSemaphore(PAGES)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise ValueError(f"cannot listen on {host}:{port}: {why}; give another --host or --port (0: any)") from None

    def server_bind(self) -> None:  # without asking a name server who this is
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = self.host, self.socket.getsockname()[1]

    def url(self, host: str = "") -> str:
        """Where a browser finds the page; `host` is this machine's name for others."""
        host = host or self.host
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.server_port}/" + f"?token={self.token}" * bool(self.token)

    def follow(self, source: Callable[[], Sequence[Event]]) -> None:
        """Show what a source tells when it is asked again and again, until an exception such as Ctrl-C."""
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()
        try:
            while True:
                try:
                    self.feed.add(source())
                except (OSError, ValueError) as error:
                    self.feed.add([], str(error))
                time.sleep(PAUSE)
        finally:
            self.feed.close()
            self.shutdown()
            self.server_close()

    def process_request(self, request: Request, client_address: object) -> None:
        """Take a client, or turn it away where there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with suppress(OSError):
            assert isinstance(request, socket.socket)
            request.sendall(b"HTTP/1.0 503 Service Unavailable\r\n\r\ntoo many connections; close some pages\n")
        self.shutdown_request(request)

    def process_request_thread(self, request: Request, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Request, client_address: object) -> None:
        """A client that breaks off is no error of ours."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = PATIENCE
    server_version, sys_version = "klatsch", ""

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if not self._knows_this_host():  # a page of the web whose name was made to point here
            return self._refuse(403, "open the page by the address that klatsch watch has printed")
        if self.server.token and not self._has_token(parse_qs(asked.query).get("token", [""])[0]):
            return self._refuse(403, "open the page by the address that klatsch watch has printed, with its token")
        if self.server.token and "token=" in asked.query:
            # Into a cookie, and out of the address; Lax, so that a link in a chat opens the page.
            cookie = f"{self._cookie}={self.server.token}; HttpOnly; SameSite=Lax; Path=/"
            self._begin(303, "text/plain", **{"Location": "/", "Set-Cookie": cookie})
        elif self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and asked.path != "/":
            self._refuse(403, "another site asks for it")
        elif asked.path == "/events":
            if not self.server.pages.acquire(blocking=False):
                return self._refuse(503, "too many pages are open; close one")
            try:
                self._begin(200, "text/event-stream")
                with suppress(OSError):  # it is closed
                    self._tell()
            finally:
                self.server.pages.release()
        elif asked.path in FILES:
            name, kind = FILES[asked.path]
            self._begin(200, kind)
            self.wfile.write((PAGE / name).read_bytes())
        else:
            self._refuse(404, "there is no such page")

    def _tell(self) -> None:
        """Send what is known, and then what comes."""
        feed, seen, trouble = self.server.feed, None, ""
        while feed.open:
            if seen is None:
                self._send("hello", json.dumps({**self.server.facts, "now": time.time()}))
                seen, events = feed.so_far()
            else:
                new = feed.after(seen, trouble)
                if new is None:  # it was too slow: from the beginning
                    seen = None
                    continue
                seen, events = new
            for k in range(0, len(events), BATCH):
                self._send("events", f"[{','.join(events[k : k + BATCH])}]")
            if trouble != feed.trouble:
                trouble = feed.trouble
                self._send("trouble", json.dumps(trouble))
            self._send("now", json.dumps(time.time()))

    def _send(self, name: str, data: str) -> None:
        self.wfile.write(f"event: {name}\ndata: {data}\n\n".encode())

    def _knows_this_host(self) -> bool:
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        return _is_number(name) or name in ("localhost", self.server.host.lower(), socket.gethostname().lower())

    @property
    def _cookie(self) -> str:
        return f"klatsch-{self.server.server_port}"  # cookies do not know of ports

    def _has_token(self, given: str) -> bool:
        with suppress(Exception):
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self._cookie)
            given = given or (cookie.value if cookie else "")
        return hmac.compare_digest(given.encode(errors="replace"), self.server.token.encode())

    def _begin(self, code: int, kind: str, **more: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": kind, **HEADERS, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def _refuse(self, code: int, why: str) -> None:
        self._begin(code, "text/plain; charset=utf-8")
        self.wfile.write(f"klatsch watch: {why}\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal is for what the user asked for."""


def is_local(host: str) -> bool:
    """Whether an address is only reached from this machine."""
    return host == "localhost" or (_is_number(host) and ipaddress.ip_address(host).is_loopback)


def _is_number(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return True
    return False
