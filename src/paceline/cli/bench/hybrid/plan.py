"""What ``paceline bench hybrid`` is to measure, checked, and which process is what.

Made by :mod:`paceline.cli.bench.hybrid` from the command line, handed to every process. No torch
here: ``--help`` and bad input answer at once.
"""

from __future__ import annotations

import enum
import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import ConfigurationError

FEATURES = 512
"""Width of the dense network's input: the outputs of all tables side by side."""

BATCHES = 10
"""In an epoch."""

CLASSES = 8


class RouteName(str, enum.Enum):
    """How a batch gets from the tables to the trainers and its gradients back."""

    RPC_TORCH = "rpc-torch"
    """torch's recipe: RemoteModule, distributed autograd, DistributedOptimizer, torch's DDP."""

    RPC_PACELINE = "rpc-paceline"
    """The same with Paceline's DDP around the dense network."""

    PS = "ps"
    """Paceline's parameter servers, with Paceline's DDP around the dense network."""


class OptimizerName(str, enum.Enum):
    """What updates tables and dense network, the same on every route."""

    SGD = "sgd"
    ADAGRAD = "adagrad"
    ROWWISE_ADAGRAD = "rowwise-adagrad"
    ADAM = "adam"

    @property
    def difference(self) -> str | None:
        """What torch's recipe does differently, where it has no counterpart."""
        return {
            OptimizerName.ROWWISE_ADAGRAD: "torch has no row-wise Adagrad; its routes run Adagrad",
            OptimizerName.ADAM: "torch's routes run Adam on every row; "
            "ps runs it on rows with a gradient, as SparseAdam",
        }.get(self)


class Role(enum.Enum):
    """What a process of the benchmark does."""

    MASTER = "master"
    TRAINER = "trainer"
    SERVER = "server"


@dataclass(frozen=True)
class HybridPlan:
    """One run.

    Attributes:
        routes: Which, in the order in which each cycle runs them.
        trainers: Processes with a copy of the dense network.
        servers: Processes that hold the tables.
        embeddings: Rows of each table.
        dim: Width of each table.
        warmup_cycles: Cycles that are run and not counted.
        cycles: Cycles that are counted; in each, every route runs one epoch.
        launches: How often all of this is done, each time with new processes.
        master_addr: Where the processes meet.
        master_port: Same.
        seed: Of weights and data.
        optimizer: Of tables and dense network.
        journal: Whether Paceline's parameter servers keep a journal.
        ps_addresses: Of Paceline's parameter servers, once they are started.
    """

    routes: tuple[RouteName, ...]
    trainers: int
    servers: int
    embeddings: int
    dim: int
    warmup_cycles: int
    cycles: int
    launches: int
    master_addr: str
    master_port: int
    seed: int = 0
    optimizer: OptimizerName = OptimizerName.SGD
    journal: bool = False
    ps_addresses: tuple[str, ...] = ()

    @property
    def tables(self) -> int:
        """How many tables there are."""
        return FEATURES // self.dim

    @property
    def uses_rpc(self) -> bool:
        """Whether a route needs torch RPC, and so a master and servers among the processes."""
        return any(route is not RouteName.PS for route in self.routes)

    @property
    def world(self) -> int:
        """How many processes: the master, trainers, servers, in this order of ranks.

        Without RPC trainers only: Paceline's servers have another owner.
        """
        return 1 + self.trainers + self.servers if self.uses_rpc else self.trainers

    @property
    def parts(self) -> list[HybridPlan]:
        """Cut into runs with processes of their own: torch RPC's threads poll even when idle."""
        over_rpc = tuple(route for route in self.routes if route is not RouteName.PS)
        over_ps = tuple(route for route in self.routes if route is RouteName.PS)
        return [replace(self, routes=routes) for routes in (over_rpc, over_ps) if routes]

    @property
    def base(self) -> str:
        """The route that the others are compared with."""
        return self.routes[0].value

    @property
    def route_names(self) -> str:
        """All routes, for a title."""
        return " and ".join(route.value for route in self.routes)

    def tables_of(self, server: int) -> list[int]:
        """Return which tables a server holds: they are dealt out in turn."""
        return list(range(server, self.tables, self.servers))

    @property
    def table_order(self) -> list[int]:
        """Return in which order tables stand side by side in the features: server by server."""
        return [table for server in range(self.servers) for table in self.tables_of(server)]

    def role_of(self, rank: int) -> tuple[Role, int]:
        """Return what a process is, and its number among those of its kind."""
        if not self.uses_rpc:
            return Role.TRAINER, rank
        if rank == 0:
            return Role.MASTER, 0
        if rank <= self.trainers:
            return Role.TRAINER, rank - 1
        return Role.SERVER, rank - 1 - self.trainers

    def at_port(self, port: int) -> HybridPlan:
        """Return the same plan with another port."""
        return replace(self, master_port=port)

    def with_ps(self, addresses: Sequence[str]) -> HybridPlan:
        """Return the same plan with parameter servers."""
        return replace(self, ps_addresses=tuple(addresses))

    def check(self) -> None:
        """See that this can be run.

        Raises:
            ConfigurationError: It cannot; the text says which option to change.
        """
        for name in ("trainers", "servers", "embeddings", "dim", "cycles", "launches"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"--{name} {getattr(self, name)}: at least 1")
        if self.warmup_cycles < 0:
            raise ConfigurationError(f"--warmup-cycles {self.warmup_cycles}: 0 or more")
        if FEATURES % self.dim:
            raise ConfigurationError(
                f"--dim {self.dim} does not divide {FEATURES}, the width of the dense network's "
                "input, which the tables fill side by side; try 64"
            )
        if self.tables < self.servers:
            raise ConfigurationError(
                f"--dim {self.dim} makes {self.tables} table(s) for {self.servers} servers, and "
                f"each needs one: at most --servers {self.tables}, or a smaller --dim"
            )


def parse_routes(words: list[str]) -> tuple[RouteName, ...]:
    """Read what ``--route`` was given, commas and repetitions included; all routes if nothing.

    Raises:
        ConfigurationError: There is no such route.
    """
    names = [name.strip() for word in words for name in word.split(",") if name.strip()]
    known = [route.value for route in RouteName]
    for name in names:
        if name not in known:
            raise ConfigurationError(f"--route {name}: there is no such route, choose from {known}")
    return tuple(dict.fromkeys(RouteName(name) for name in names)) or tuple(RouteName)


def choose_port(address: str, port: int) -> int:
    """Return the port to meet at: the given one if it is free, any free one for 0.

    Raises:
        ConfigurationError: The port is taken, or the address is not one of this machine.
    """
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            return int(probe.getsockname()[1])
    except (OSError, OverflowError) as error:
        raise ConfigurationError(_why(address, port, error)) from error


def _why(address: str, port: int, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"--master-port {port} is in use at {address}: choose another, or 0 for a free one"
    return (
        f"--master-addr {address}, --master-port {port}: {error}. All processes run on this "
        "machine, so the address must be one of its own"
    )
