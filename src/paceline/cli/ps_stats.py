"""``paceline ps stats``: ask servers, and show what they say as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import zmq
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.errors import ServerStartError
from paceline.ps.protocol.keys import read_client_keys
from paceline.ps.protocol.settings import TCP
from paceline.ps.protocol.wire import Head, Kind, WireError, pack_control, unpack

Stats = dict[str, Any]


def show(args: argparse.Namespace) -> int:
    """Ask once, or again and again; returns 1 if a server did not answer."""
    console = Console()
    if args.watch is None:
        found = ask_all(args)
        if args.json:
            print(json.dumps(found, indent=1))
        else:
            console.print(_picture(found))
        return int(any("error" in each for each in found))
    try:
        _watch(args, console)
    except KeyboardInterrupt:
        return 0
    return 0


def ask_all(args: argparse.Namespace) -> list[Stats]:
    """What each server says; ``error`` for one that does not answer."""
    with zmq.Context() as context:
        return [_ask(context, address, args) for address in args.addresses]


def _watch(args: argparse.Namespace, console: Console) -> None:
    if args.json:
        while True:
            print(json.dumps(ask_all(args)), flush=True)
            time.sleep(args.watch)
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            live.update(_picture(ask_all(args)), refresh=True)
            time.sleep(args.watch)


def _ask(context: zmq.Context[Any], address: str, args: argparse.Namespace) -> Stats:
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if args.keys is not None:
            for name, value in read_client_keys(args.keys).curve().items():
                setattr(socket, name, value)
        elif address.startswith(TCP):
            raise ServerStartError(f"{address} lets in nobody without a key: --keys DIR")
        try:
            socket.connect(address)
            return {"address": address, **_pages(socket, args.timeout)}
        except (zmq.ZMQError, TimeoutError, WireError) as error:
            return {"address": address, "error": str(error)}


def _pages(socket: Any, timeout_s: float) -> Stats:
    """All tables: a server tells of some of them at a time."""
    found = _one_page(socket, 0, timeout_s)
    while len(found["tables"]) < found["table_count"]:
        more = _one_page(socket, len(found["tables"]), timeout_s)["tables"]
        if not more:
            break
        found["tables"] += more
    return found


def _one_page(socket: Any, first: int, timeout_s: float) -> Stats:
    head = Head(Kind.STATS, first + 1, os.urandom(16))
    socket.send_multipart(pack_control(head, {"first": first}))
    if not socket.poll(int(timeout_s * 1000)):
        raise TimeoutError(f"no answer within {timeout_s:g} s: is it running, is the key right?")
    answer = unpack(socket.recv_multipart())
    if answer.head.kind is not Kind.DONE:
        raise WireError(f"it answered {dict(answer.control)}")
    return dict(answer.control)


def _picture(servers: list[Stats]) -> Group:
    table = Table(box=None, header_style="bold")
    for name in ("server", "table", "shard"):
        table.add_column(name, overflow="fold")
    for name in ("rows", "MiB", "lookups/s", "p50", "p99", "pushes/s", "p50", "p99 us"):
        table.add_column(name, justify="right")
    for number, server in enumerate(servers):
        for each in server.get("tables", ()):
            table.add_row(str(number), *_cells(each))
    lines = [_line(number, server) for number, server in enumerate(servers)]
    return Group(*lines, Text(""), table)


def _cells(table: Stats) -> list[str]:
    return [
        table["name"],
        table["shard"],
        f"{table['rows']:,} of {table['table_rows']:,}",
        _mib(table["bytes"]),
        f"{table['lookups_per_s']:,.1f}",
        _us(table["lookup_p50_us"]),
        _us(table["lookup_p99_us"]),
        f"{table['pushes_per_s']:,.1f}",
        _us(table["push_p50_us"]),
        _us(table["push_p99_us"]),
    ]


def _line(number: int, server: Stats) -> Text:
    if "error" in server:
        return Text(f"{number}  {server['address']}  {server['error']}", style="red")
    kept = "durable" if server["durable"] else "memory only"
    return Text(
        f"{number}  {server['address']}  pid {server['pid']}, up {server['uptime_s']:,.0f} s, "
        f"{kept}, "
        f"{_mib(server['rss_bytes'])} MiB resident, {_mib(server['used_bytes'])} of "
        f"{_mib(server['max_bytes'])} MiB of rows, {server['clients']} clients, "
        f"{server['refused']} refused, {server['dropped']} dropped"
    )


def _mib(count_bytes: int) -> str:
    return f"{count_bytes / (1 << 20):,.1f}"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
