"""Read a run folder into memory, as far as it can be read.

Called by ``paceline report``. A damaged file costs its rank, not the report: what is wrong is kept
in words, and the page shows it. Must not know what is made of the records.
"""

from __future__ import annotations

import enum
import os
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from paceline.errors import ConfigurationError
from paceline.observe.membership import MembershipChange, is_of_earlier_job, read_membership
from paceline.observe.records import Activity, RankHistory
from paceline.observe.ring import read_history
from paceline.observe.run_folder import WHO_RECORDS, RunFolder, RunInfo
from paceline.observe.stall.account import read_watch_info
from paceline.processes import ProcessState, host_name, process_space, process_state
from paceline.report.elastic import current_members, join_former, lost_records

# A rank of another host that has not written for this long is gone.
SILENT_S = 60.0
MAX_FAILURE_CHARACTERS = 20_000
MAX_NAMED = 50


class RunState(enum.Enum):
    """What became of a run."""

    RUNNING = "running"
    """A rank is alive and has not ended."""
    FINISHED = "finished"
    """All ranks ended in order."""
    FAILED = "failed"
    """A rank ended with an exception, or the launcher says so."""
    STOPPED = "stopped"
    """A rank is gone and did not say why: killed, or the machine went down."""


@dataclass(frozen=True)
class Run:
    """One run, as far as its folder could be read.

    Attributes:
        name: The folder's name.
        info: What the launcher wrote; None without one.
        histories: One for each rank that could be read, by rank.
        state: What became of it.
        failure: Who failed first, in words, if somebody did.
        problems: What could not be read, in words.
        membership: Who took part from when on, if the job was elastic.
    """

    name: str
    info: RunInfo | None
    histories: tuple[RankHistory, ...]
    state: RunState
    failure: str = ""
    problems: tuple[str, ...] = ()
    membership: tuple[MembershipChange, ...] = ()


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a run folder.

    Raises:
        ConfigurationError: There is no such folder, it holds no records, or no record of a step.
    """
    folder = _open(Path(path))
    histories: list[RankHistory] = []
    problems: list[str] = []
    for rank in folder.ranks():
        try:
            histories.append(read_history(folder.events(rank)))
        except (OSError, ValueError) as error:
            problems.append(f"{folder.events(rank).name} cannot be read: {_reason(error)}")
    if not histories:
        raise ConfigurationError(f"no file of records in {path} can be read: {'; '.join(problems)}")
    membership = read_membership(folder.membership)
    if membership:
        problems += lost_records(folder, histories, membership)
        histories = join_former(folder, histories)
    else:
        problems += _leave_out_earlier(histories)
    if not any(history.steps for history in histories):
        raise ConfigurationError(
            f"the run {path} has not finished a step yet, so there is nothing to report; "
            "`paceline doctor` shows what its ranks are doing"
        )
    info, failure = folder.read_info(), _failure(folder)
    if not membership:
        problems += _missing(histories, info)
    state = _state(folder, current_members(histories, membership), failure)
    name = _name(folder)
    return Run(name, info, tuple(histories), state, failure, tuple(problems), membership)


def _leave_out_earlier(histories: list[RankHistory]) -> list[str]:
    """Leave out what a job with more ranks has left in the folder; say so."""
    first = histories[0].info
    left = [h for h in histories if is_of_earlier_job(h.info, first)]
    histories[:] = [each for each in histories if not is_of_earlier_job(each.info, first)]
    if not left:
        return []
    ranks = ", ".join(str(history.info.rank) for history in left[:MAX_NAMED])
    return [f"Records of an earlier job with more ranks ({ranks}) are left out."]


def _open(path: Path) -> RunFolder:
    if not path.exists():
        raise ConfigurationError(f"there is no run folder {path}{_newest_hint(path)}")
    if not path.is_dir():
        raise ConfigurationError(f"{path} is a file; name the run folder that holds it")
    folder = RunFolder(path)
    try:
        ranks = folder.ranks()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    if not ranks and folder.read_info() is not None:
        raise ConfigurationError(f"no rank of the run {path} has recorded anything: {WHO_RECORDS}")
    if not ranks:
        raise ConfigurationError(
            f"{path} is not a run folder: it holds no rank*.events{_newest_hint(path)}. Start a "
            "job with `paceline run`, or set PACELINE_RUN_DIR"
        )
    return folder


def _newest_hint(path: Path) -> str:
    """Name the newest run below a folder of runs."""
    parent = path if path.is_dir() else path.parent
    try:
        runs = [each for each in parent.iterdir() if any(each.glob("rank*.events"))]
        newest = max(runs, key=lambda each: each.stat().st_mtime, default=None)
    except OSError:
        return ""
    return f" (the newest run there is {newest})" if newest else ""


def _name(folder: RunFolder) -> str:
    return folder.path.resolve().name


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _failure(folder: RunFolder) -> str:
    try:
        with folder.failure.open("rb") as file:
            text = file.read(4 * MAX_FAILURE_CHARACTERS).decode(errors="replace")
    except OSError:
        return ""
    return text[:MAX_FAILURE_CHARACTERS].strip()


def _missing(histories: list[RankHistory], info: RunInfo | None) -> list[str]:
    world = info.world if info else max(history.info.world for history in histories)
    known = {history.info.rank for history in histories}
    # Not a list of all: files may say any number.
    missing = list(islice((rank for rank in range(world) if rank not in known), MAX_NAMED + 1))
    if not missing:
        return []
    names = ", ".join(map(str, missing[:MAX_NAMED])) + (" …" if len(missing) > MAX_NAMED else "")
    lost = "what others lost by them is not known"
    return [f"Of {world} ranks, {names} left no readable records: {lost}."]


def _state(folder: RunFolder, histories: list[RankHistory], failure: str) -> RunState:
    if any(_is_alive(folder, history) for history in histories):
        return RunState.RUNNING
    ended = [history.status.activity is Activity.ENDED for history in histories]
    # A rank that ended in order has nothing to add.
    said = any(history.status.detail for history, end in zip(histories, ended, strict=True) if end)
    if failure or said:
        return RunState.FAILED
    return RunState.FINISHED if all(ended) else RunState.STOPPED


def _is_alive(folder: RunFolder, history: RankHistory) -> bool:
    if history.status.activity is Activity.ENDED:
        return False
    watch = read_watch_info(folder.watch(history.info.rank))
    if watch is not None and watch.pid == history.info.pid and watch.space == process_space():
        # Since when it runs is known, too: its pid may be another process's by now.
        return process_state(watch.pid, watch.started) is not ProcessState.DEAD
    if history.info.host != host_name():
        beat_s = (history.status.beat_ns + history.info.wall_minus_monotonic_ns) / 1e9
        return time.time() - beat_s < SILENT_S
    return process_state(history.info.pid) is not ProcessState.DEAD
