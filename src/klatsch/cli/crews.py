"""`klatsch crew`: a crew that changes while it trains: its registry, joining it, and what it does."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from klatsch.cli import terminal
from klatsch.cli.app import Group, app, command, examples, show_help
from klatsch.cli.terminal import AsJson, number, option, print_json, text, words
from klatsch.files import token_of
from klatsch.units import duration, size

crew = typer.Typer(
    cls=Group,
    help="A crew that changes while it trains: its registry, joining it, and what it does.",
    epilog=examples("crew serve --token-file token", "crew join 10.0.0.1:4711 --token-file token -- python train.py"),
)
app.add_typer(crew, name="crew")
crew.callback(invoke_without_command=True)(show_help)

Where = Annotated[str, typer.Argument(help="Of the registry, and of others that may replace it.", metavar="HOST:PORT")]
Token = Annotated[Path | None, text("File with the crew's token.", "--token-file", metavar="FILE")]


@command("crew serve", "crew serve --token-file token", "crew serve --token-file token --port 5000", to=crew)
def serve(
    host: Annotated[str | None, text("Address to listen on (all with a token, else 127.0.0.1).")] = None,
    port: Annotated[int, option("Port to listen on.")] = 4711,
    token_file: Annotated[
        Path | None, text("File with the crew's token; made if there is none.", "--token-file", metavar="FILE")
    ] = None,
    least: Annotated[int, option("Begin as soon as N members are there (after 3 s with those there).")] = 0,
    timeout: Annotated[float, option("Seconds of silence after which a member is out.", parser=number)] = 10.0,
    quorum: Annotated[float, option("Share of an epoch that the next one must keep.", parser=number)] = 0.5,
) -> None:
    """Run the registry of a crew; no training stops if it ends, and a new one takes over."""
    from klatsch.ranks.registry import Coordinator, Registry

    for flag, value, holds, wanted in (
        ("port", port, 0 <= port < 1 << 16, "a port from 1 to 65535, or 0 for any"),
        ("least", least, least >= 0, "a number of members from 0 up"),
        ("timeout", timeout, 0.1 <= timeout <= 3600, "seconds from 0.1 to 3600"),
        ("quorum", quorum, 0 <= quorum <= 1, "a share from 0 to 1"),
    ):
        if not holds:
            raise ValueError(f"--{flag} {value:g}: give {wanted}")
    host = host or ("0.0.0.0" if token_file else "127.0.0.1")
    if token_file is None and host not in ("127.0.0.1", "::1", "localhost"):
        raise ValueError(f"--host {host}: without a token anyone could join; give --token-file FILE, which is made")
    token = token_of(token_file, make=True)

    def ready(bound: str, bound_port: int) -> None:
        own = outward() if bound == "0.0.0.0" else f"[{bound}]" if ":" in bound else bound
        _say(f"the registry of a crew listens on {bound}:{bound_port}; members join with")
        flag = f" --token-file {token_file}" if token_file else ""
        _say(f"    klatsch crew join {own}:{bound_port}{flag} -- python train.py")
        if not token_file:
            _say("from this machine only: it has no token (--token-file FILE makes one)")

    coordinator = Coordinator(timeout=timeout, least=least, quorum=quorum, tell=_say)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        asyncio.run(Registry(token, coordinator).serve(host, port, ready))
    except OSError as error:
        why = str(error.strerror).rpartition(": ")[2]  # without what asyncio says before it
        raise ValueError(f"cannot listen on {host}:{port}: {why}; give another --host or --port") from None


@command(
    "crew join 10.0.0.1:4711 --token-file token -- python train.py --lr 0.1",
    more="The command replaces this one and has KLATSCH_CREW and KLATSCH_CREW_TOKEN_FILE in its environment.",
    to=crew,
)
def join(
    address: Where,
    program: Annotated[list[str], typer.Argument(help="The command, after --.", metavar="-- COMMAND")],
    token_file: Token = None,
) -> None:
    """Run a training script as a member of a crew, at any time."""
    from klatsch.ranks.registry import address_of

    for one in words(address):
        address_of(one)
    token_of(token_file)
    environment = os.environ | {"KLATSCH_CREW": address}
    if token_file is not None:
        environment["KLATSCH_CREW_TOKEN_FILE"] = str(token_file.resolve())
    sys.stdout.flush()
    try:
        os.execvpe(program[0], program, environment)  # so that signals and the exit code are the command's
    except OSError as error:
        raise ValueError(f"cannot run {program[0]!r}: {error.strerror}; give a command after --") from None


@command("crew status 10.0.0.1:4711 --token-file token", "crew status localhost:4711 --links --watch", to=crew)
def status(
    address: Where,
    token_file: Token = None,
    links: Annotated[bool, typer.Option("--links", help="Show how fast its links are.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show who is in a crew, in which round, and how they are doing."""
    from klatsch.ranks.registry import address_of, ask

    addresses, token = [address_of(one) for one in words(address)], token_of(token_file)
    while True:
        told = ask(addresses, token, {"op": "status"} | ({"links": True} if links or as_json else {}))
        if watch and sys.stdout.isatty():
            terminal.console().clear()
        content = {name: told[name] for name in ("epoch", "start", "waits_for", "members", "facts")}
        if as_json:
            print_json(content)
        else:
            _show(content)
            if links:
                _show_links(content["members"])
        if not watch:
            return
        sys.stdout.flush()
        time.sleep(1.0)


@command("crew drop 3fa9c1d2 10.0.0.1:4711 --token-file token", to=crew)
def drop(
    member: Annotated[str, typer.Argument(help="Its id, as klatsch crew status shows it.")],
    address: Where,
    token_file: Token = None,
) -> None:
    """Go on without a member, at once; it does not come back by itself."""
    from klatsch.ranks.registry import address_of, ask

    ask([address_of(one) for one in words(address)], token_of(token_file), {"op": "drop", "member": member})
    print(f"{member} was dropped")


def _show(content: dict[str, Any]) -> None:
    members = content["members"]
    title = f"epoch {content['epoch']} from round {content['start']:,}"
    lines = [
        {
            "member": row["member"],
            "host": row["host"],
            "address": row["address"],
            "state": row["state"],
            "round": f"{row['round']:,}",
            "lag": f"{row['lag']:,}",
            "loss": _shown(row.get("loss")),
            "sent": size(row["bytes"]) if isinstance(row.get("bytes"), int) else "",
            "waited": f"{row['waited']:.1f} s" if isinstance(row.get("waited"), int | float) else "",
            "neighbours": ", ".join(str(one) + " (NCCL)" * (one in row["nccl"]) for one in row["neighbours"]),
            "lost": ", ".join(map(str, row.get("lost", []))),
        }
        for row in ({"neighbours": [], "nccl": []} | row for row in members)
    ]
    if lines:
        terminal.print_table(title, lines, ["neighbours", "address", "waited", "lost"])
    else:
        print("nobody is in the crew")
    if content["waits_for"]:
        terminal.note(f"no change yet: {content['waits_for']}", "yellow")


def _show_links(members: list[dict[str, Any]]) -> None:
    lines = [
        {"from": row["member"], "to": other, "there and back": duration(trip), "per second": size(rate) if rate else ""}
        for row in members
        for other, (trip, rate) in row.get("links", {}).items()
    ]
    if lines:
        terminal.print_table("links", lines)
    else:
        print("no links are known")


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""


def _say(line: str) -> None:
    with suppress(OSError):  # whoever read it is gone; the crew is not
        print(line, flush=True)


def outward() -> str:
    """The address of this machine that others see; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:  # there is no way out of its network
            return socket.gethostname()
