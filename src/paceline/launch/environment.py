"""The environment of a rank, variable by variable as torchrun sets it.

Called by ``job.py``. ``tests/cli/test_run.py`` compares it with torchrun's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.cores import usable_cores
from paceline.launch.rendezvous import Endpoint

PATCH = "PACELINE_PATCH"
STALL_AFTER = "PACELINE_STALL_AFTER"
OF_A_MEMBER = frozenset(
    {
        "PACELINE_RECORD_AS",
        *(f"PACELINE_ELASTIC_{name}" for name in ("DIR", "MEMBER", "ATTEMPT", "HOSTS", "PID")),
    }
)
"""What one rank of an elastic job is told, and no rank of a job that it starts may hear."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank is in the job."""

    rank: int
    local_rank: int
    host: int
    worlds: tuple[int, ...]  # ranks of each host


def places(worlds: Sequence[int], host: int) -> list[RankPlace]:
    """The ranks of one host; ranks are numbered host by host."""
    first = sum(worlds[:host])
    return [RankPlace(first + i, i, host, tuple(worlds)) for i in range(worlds[host])]


def rank_environ(place: RankPlace, store: Endpoint, run_id: str, error_file: str) -> dict[str, str]:
    """What differs from rank to rank or is about the job."""
    world, local_world = sum(place.worlds), place.worlds[place.host]
    values: dict[str, object] = {
        "LOCAL_RANK": place.local_rank,
        "RANK": place.rank,
        "GROUP_RANK": place.host,
        "ROLE_RANK": place.rank,
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": local_world,
        "WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": len(place.worlds),
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": store.host,
        "MASTER_PORT": store.port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_ERROR_FILE": error_file,
    }
    return {name: str(value) for name, value in values.items()}


def job_environ(
    ranks: int, run_dir: str, options: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What all ranks of a host share; torch reads some of it when it is imported."""
    given = os.environ if environ is None else environ
    found = {name: value for name, value in given.items() if name not in OF_A_MEMBER}
    found.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    found.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return {**found, **options, "PACELINE_RUN_DIR": run_dir}
