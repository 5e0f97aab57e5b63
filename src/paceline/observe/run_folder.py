"""A run folder: where a job's records, logs and reports lie, and which name each file has.

Made by ``paceline run`` (or by whoever sets PACELINE_RUN_DIR), read by ``paceline report``,
``doctor`` and ``verify``. Must not import torch.

    RUN/                    mode 0700, whatever the umask
      run.json              RunInfo, written once by the launcher
      host0.pids            which processes are the ranks of host 0 (launched.py)
      rank0.log             what rank 0 wrote to stdout and stderr
      rank0.events          its records (ring.py)
      rank0.checksums       of a training over shards (checksum_file.py)
      rank0.1.checksums     the same for a second wrapper with shards
      membership.jsonl      an elastic job's epochs: who, why, how long each phase took
      failure.txt           the block that says who failed first, if somebody did
      stall-1.txt           a stall report, if there was one
      report.html           what ``paceline report RUN`` makes
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import ConfigurationError
from paceline.observe.private_file import write_whole
from paceline.observe.untrusted import MAKES_NO_SENSE, read_fields

RUN_DIR = "PACELINE_RUN_DIR"
"""The environment variable that tells ranks where to record."""

RECORD_AS = "PACELINE_RECORD_AS"
"""The environment variable with the number that names a rank's files, where that is not its rank:
in an elastic job ranks change, and files do not."""

WHO_RECORDS = (
    "Paceline's DDP records, from the first wrapper on; a script with torch's DDP needs `paceline "
    "run --patch`"
)
"""For whoever looks for records and finds none."""

RUNS = Path("paceline-runs")
"""Where ``paceline run`` puts run folders, below the working directory."""


@dataclass(frozen=True)
class RunInfo:
    """What is known of a run before its first step.

    Attributes:
        name: The folder's name.
        command: The script (or module) and its arguments, without secrets (``masked.py``); no
            environment, which may hold some.
        world: Ranks in all.
        hosts: How many hosts.
        launcher_pid: The process that started the ranks of this host.
        began_s: Seconds since 1970.
        versions: Of paceline, torch and Python.
    """

    name: str
    command: tuple[str, ...]
    world: int
    hosts: int
    launcher_pid: int
    began_s: float
    versions: dict[str, str]


class RunFolder:
    """One run's files, by name. Nothing is read or made before it is asked for."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @classmethod
    def create(
        cls, script: str, path: str | os.PathLike[str] | None = None, *, join: bool = False
    ) -> RunFolder:
        """Make a new folder, private to this user; with a name of its own unless one is given.

        Args:
            script: The default name is made of it.
            path: Where; new or empty.
            join: Another host of the same run may have made it, on a file system that they share.

        Raises:
            ConfigurationError: It cannot be made, is not empty, or belongs to another user.
        """
        where = Path(path) if path is not None else RUNS / _new_name(script)
        try:
            where.parent.mkdir(parents=True, exist_ok=True)
            if _is_new(where) or _is_free(where, join=join):
                os.chmod(where, 0o700)
            if not join:
                _claim(where)
        except OSError as error:
            raise ConfigurationError(
                f"the run folder {where} cannot be made: {error.strerror}; choose another place "
                "with --run-dir"
            ) from error
        return cls(where)

    def log(self, rank: int) -> Path:
        """What a rank wrote to stdout and stderr."""
        return self.path / f"rank{rank}.log"

    def events(self, rank: int) -> Path:
        """A rank's records."""
        return self.path / f"rank{rank}.events"

    def former_events(self, rank: int) -> Path:
        """Records of the process that had this place before."""
        return self.path / f"rank{rank}.events.old"

    def launched(self, host: int) -> Path:
        """Which processes are the ranks of a host."""
        return self.path / f"host{host}.pids"

    @property
    def failure(self) -> Path:
        """Who failed first, in words."""
        return self.path / "failure.txt"

    def stall(self, number: int) -> Path:
        """A stall report; numbers count from 1."""
        return self.path / f"stall-{number}.txt"

    def watch(self, rank: int) -> Path:
        """Which process a rank is, for those who look after it."""
        return self.path / f"rank{rank}.watch"

    def stacks(self, rank: int) -> Path:
        """Where a rank writes its stacks when it is sent a signal."""
        return self.path / f"rank{rank}.stacks"

    def account(self, rank: int) -> Path:
        """What a rank last said of itself."""
        return self.path / f"rank{rank}.account"

    @property
    def ask(self) -> Path:
        """Changed by whoever wants accounts of all ranks."""
        return self.path / "ask"

    def ranks(self) -> list[int]:
        """Ranks that have recorded something."""
        names = (re.fullmatch(r"rank(\d+)\.events", path.name) for path in self.path.iterdir())
        return sorted(int(match[1]) for match in names if match)

    @property
    def membership(self) -> Path:
        """Epochs of an elastic job, one JSON object in a line."""
        return self.path / "membership.jsonl"

    @property
    def coordinator(self) -> Path:
        """Where an elastic job takes orders: the path of its private directory."""
        return self.path / "coordinator"

    def write_info(self, info: RunInfo) -> None:
        """Write run.json, whole or not at all."""
        final = self.path / "run.json"
        try:
            write_whole(final, json.dumps(asdict(info), indent=1))
        except OSError:
            with contextlib.suppress(OSError):
                if not final.stat().st_size:  # the claim of the folder
                    final.unlink()
            raise

    def read_info(self) -> RunInfo | None:
        """Return what run.json says; None if there is none, or nothing that makes sense."""
        try:
            return read_fields(self.path / "run.json", RunInfo)
        except MAKES_NO_SENSE:
            return None


def _is_new(where: Path) -> bool:
    """Make the folder; say whether it was not there."""
    try:
        where.mkdir(mode=0o700)
    except FileExistsError:
        return False
    return True


def _is_free(where: Path, *, join: bool) -> bool:
    """Check a folder that was there, and change nothing; say whether it is empty and this user's.

    One that other hosts have begun to fill is joined as it is.
    """
    names = [path.name for path in where.iterdir()]
    if names and not join:
        what = "belongs to another run: name another" if "run.json" in names else _NOT_EMPTY
        raise ConfigurationError(f"the run folder {where} {what}")
    owner = where.stat().st_uid
    if owner != os.geteuid() and not join:
        raise ConfigurationError(
            f"the run folder {where} belongs to another user (uid {owner}), who could change what "
            "is recorded: name another"
        )
    return not names and owner == os.geteuid()


_NOT_EMPTY = "is not empty: name another, or remove it"


def _claim(where: Path) -> None:
    """Be the first to put a run.json there: two runs may have found it empty at the same time."""
    try:
        os.close(os.open(where / "run.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError as error:
        raise ConfigurationError(
            f"the run folder {where} belongs to another run, which has begun at the same moment: "
            "name another"
        ) from error


def recorded_rank(rank: int) -> int:
    """The number in the names of this process's files."""
    return int(os.environ.get(RECORD_AS, rank))


def _new_name(script: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(script).stem) or "run"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}-{os.getpid()}"


def find_run(name: str) -> RunFolder:
    """Return a run folder by path, by name in ``paceline-runs``, or the one that began last.

    Raises:
        ConfigurationError: There is none.
    """
    if name == "latest":
        found = [folder for folder in map(RunFolder, RUNS.glob("*/")) if _is_run(folder)]
        if not found:
            raise ConfigurationError(
                f"there is no run in {RUNS}: name a folder, or start one with `paceline run`"
            )
        return max(found, key=_began_s)
    for path in (Path(name), RUNS / name):
        if path.is_dir():
            folder = RunFolder(path)
            if _is_run(folder):
                return folder
            raise ConfigurationError(
                f"{path} is no run folder: it has neither run.json nor a rank's records. Name what "
                "`paceline run` printed, or what PACELINE_RUN_DIR was set to"
            )
    raise ConfigurationError(
        f"there is no run folder {name}, nor {RUNS / name}. `paceline doctor` lists running jobs"
    )


def _is_run(folder: RunFolder) -> bool:
    return (folder.path / "run.json").exists() or bool(folder.ranks())


def _began_s(folder: RunFolder) -> float:
    """When a run began; one that has no run.json, when the oldest of its files was last written.

    Not the time of the folder: a report that is written into it later changes that.
    """
    info = folder.read_info()
    if info is not None and isinstance(info.began_s, (int, float)):
        return info.began_s
    times = []
    for path in folder.path.iterdir():
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return min(times, default=0.0)
