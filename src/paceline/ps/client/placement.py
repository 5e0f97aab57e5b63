"""Which server gets which table, and telling them so. Called by ``ps/client/table_set.py``.

A table that is cut by rows is on all servers. One that is not goes where it is already, or, if it
is new, where a rule says that depends on the tables of the module alone: all trainers find the same
place without talking to each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import ConfigurationError
from paceline.ps.client.connection import Servers
from paceline.ps.client.table_config import TableConfig
from paceline.ps.client.table_group import AttachedTable
from paceline.ps.protocol.table_spec import Shard, Sharding
from paceline.ps.protocol.wire import Kind


def attach(servers: Servers, configs: Sequence[TableConfig]) -> list[AttachedTable]:
    """Create the tables, or use those that are there.

    Raises:
        ServerRefusedError: A server has a table of this name that is another.
        ConfigurationError: Two tables of the same name, or a pooling that cannot be had.
    """
    names = [config.name for config in configs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigurationError(f"two tables of the same name {twice!r} in one module")
    for config in configs:
        config.check_pooling(len(servers))
    table_servers = _table_servers(servers, configs)
    wanted = [
        (server, table)
        for table, config in enumerate(configs)
        for server in range(len(servers))
        if table_servers[table] in (None, server)
    ]
    answers = servers.ask(
        [
            (server, Kind.ATTACH, _request(configs[table], server, len(servers)))
            for server, table in wanted
        ]
    )
    numbers = [[-1] * len(servers) for _ in configs]
    for (server, table), answer in zip(wanted, answers, strict=True):
        numbers[table][server] = int(answer["table"])
        servers.channels[server].names[int(answer["table"])] = configs[table].name
    return [
        AttachedTable(config, tuple(found)) for config, found in zip(configs, numbers, strict=True)
    ]


def balanced(configs: Sequence[TableConfig], servers: int) -> list[int]:
    """A server for each whole table: the largest first, each to where there is least."""
    loads = [0] * servers
    table_servers = [0] * len(configs)
    sizes = [config.num_embeddings * config.embedding_dim for config in configs]
    for table in sorted(range(len(configs)), key=lambda at: (-sizes[at], configs[at].name)):
        table_servers[table] = loads.index(min(loads))
        loads[table_servers[table]] += sizes[table]
    return table_servers


def _table_servers(servers: Servers, configs: Sequence[TableConfig]) -> list[int | None]:
    whole = [at for at, config in enumerate(configs) if _is_whole(config)]
    table_servers: list[int | None] = [None] * len(configs)
    if not whole:
        return table_servers
    known = {
        table["name"]: server
        for server, found in enumerate(servers.stats() if len(servers) > 1 else [])
        for table in found["tables"]
    }
    places = balanced([configs[at] for at in whole], len(servers))
    for at, place in zip(whole, places, strict=True):
        table_servers[at] = known.get(configs[at].name, place)
    return table_servers


def _is_whole(config: TableConfig) -> bool:
    return config.sharding == Sharding.TABLE.value


def _request(config: TableConfig, server: int, servers: int) -> dict[str, object]:
    index, count = (0, 1) if _is_whole(config) else (server, servers)
    shard = Shard(Sharding(config.sharding), index, count)
    return {"table": config.spec().to_json(), "shard": shard.to_json()}
