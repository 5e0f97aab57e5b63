"""A server's life with files, played in a process of its own on a disk that fails, and its proof.

The story has everything that writes: pushes, a refused push, snapshots, two saves to one directory,
a staged load and one that is not, and a clean end. ``play`` runs it in a forked process until the
fault ends it, ``prove`` starts a server without faults on what is left, lets the client send
again what was not acknowledged, and compares every row with the sum of what was done.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import os
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ServerStartError, ServerStateError
from paceline.ps.protocol.table_spec import TableSpec
from paceline.ps.protocol.wire import Frame, Head, Kind, pack_control, unpack
from paceline.ps.server.dispatch import DeferredReply, Handler
from paceline.ps.server.save_root import SaveRoot
from paceline.ps.state.refusal import Refusal
from paceline.ps.state.store import Store
from paceline.ps.storage import files
from paceline.ps.storage.durable import Durable
from paceline.ps.storage.load import build_aside, find_save
from tests.ps.killed_durable import close_as_killed
from tests.ps.raw_client import WHOLE, attach_frames, rows_frames
from tests.ps.storage.faulty_disk import FaultyDisk

SPECS = (TableSpec("a", 100, 3), TableSpec("b", 50, 2))
IDS = [1, 7, 49]
CLIENT = b"story-client-016"
LOADED = 1000.0


class Act(enum.Enum):
    """One thing that happens in the story."""

    ATTACH_A = enum.auto()
    ATTACH_B = enum.auto()
    ZERO = enum.auto()
    ADD = enum.auto()
    WRONG = enum.auto()
    LOAD = enum.auto()
    LOAD_STAGED = enum.auto()
    STAGE = enum.auto()
    SNAPSHOT = enum.auto()
    SAVE = enum.auto()
    TIDY = enum.auto()
    END = enum.auto()


A = Act
UNNUMBERED = {A.STAGE, A.SNAPSHOT, A.SAVE, A.TIDY, A.END}
STORY = [
    *(A.ATTACH_A, A.ATTACH_B, A.ZERO, A.ADD, A.ADD, A.SNAPSHOT, A.ADD, A.WRONG, A.ADD, A.SAVE),
    *(A.TIDY, A.ADD, A.SAVE, A.TIDY, A.STAGE, A.ADD, A.LOAD_STAGED, A.ADD, A.ADD, A.SNAPSHOT),
    *(A.ADD, A.LOAD, A.ADD, A.END),
]


@dataclass
class Scene:
    """Where a story is played.

    Args:
        root: Everything that the server writes is below it.
        saved: A save that was there before, in which all rows are ``LOADED``.
        fsync: Of the server.
    """

    root: Path
    saved: Path
    fsync: bool

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def save(self) -> Path:
        return self.root / "saves" / "one"


@dataclass
class Told:
    """What the client heard: for each act that was begun, by its place in the story, the outcome.

    None is no answer. ``tokens`` are of what was staged, ``ended`` is why the server ended.
    """

    outcomes: dict[int, str | None] = field(default_factory=dict)
    tokens: dict[int, str] = field(default_factory=dict)
    ended: str = ""
    operations: int = 0
    crash: str = ""


class Player:
    """A server without a socket, and its client."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.store = Store(1 << 20, 1 << 20)
        self.durable = Durable(scene.state, self.store, scene.fsync)
        self.handler = Handler(self.store, self.durable, SaveRoot(scene.saved.parent))
        self.token: str | None = None

    def do(self, place: int) -> str:
        """One act; returns its outcome: done, or the code of a refusal."""
        act = STORY[place]
        if act is A.END:
            self.durable.close()
            return "done"
        if act is A.SNAPSHOT:
            return self._snapshot()
        answer = self.handler.answer(self._frames(place))
        self.durable.sync()
        if isinstance(answer, DeferredReply):
            answer = self._later(answer)
        message = unpack(answer)
        if message.head.kind is Kind.ERROR:
            assert message.control["code"] != "internal", message.control
            return str(message.control["code"])
        self.token = message.control.get("staged", self.token)
        return "done"

    def _snapshot(self) -> str:
        """As the server does, without the fork."""
        try:
            self.durable.begin_snapshot()()
        except OSError as error:
            return f"failed: {error}"
        self.durable.end_snapshot()
        return "done"

    def _later(self, deferred: DeferredReply) -> list[Frame]:
        try:
            return deferred.done(json.loads(json.dumps(deferred.work())))
        except Refusal as refusal:
            return self.handler.refuse(deferred.head, refusal)
        except Exception as error:  # as the child's job tells it
            return self.handler.refuse(deferred.head, Refusal(deferred.code, str(error)))

    def _frames(self, place: int) -> list[Frame]:
        act, sequence = STORY[place], number_of(place)
        control: dict[str, Any] = {"path": str(self.scene.saved)}
        if act in (A.SAVE, A.TIDY):
            found = {"path": str(self.scene.save), "save": f"{STORY[:place].count(A.TIDY):016x}"}
            words = {**found, "tidy": True} if act is A.TIDY else found
            return pack_control(Head(Kind.SAVE, 1, CLIENT), words)
        if act is A.STAGE:
            return pack_control(Head(Kind.STAGE, 1, CLIENT), control)
        if act in (A.LOAD, A.LOAD_STAGED):
            if act is A.LOAD_STAGED and self.token is not None:
                control["staged"] = self.token
            return pack_control(Head(Kind.LOAD, 1, CLIENT, sequence), control)
        if act in (A.ATTACH_A, A.ATTACH_B):
            spec = SPECS[act is A.ATTACH_B]
            return attach_frames(Head(Kind.ATTACH, 1, CLIENT, sequence), spec)
        return _rows(act, sequence)


def _rows(act: Act, sequence: int) -> list[Frame]:
    kind = Kind.WRITE if act is A.ZERO else Kind.PUSH
    parts = []
    for number, spec in enumerate(SPECS):
        value = 0.0 if act is A.ZERO else -1.0
        ids = [*IDS[:2], 10**6] if act is A.WRONG else IDS
        values = torch.full((len(ids), spec.dim), value)
        parts.append((number, spec, ids, values, 0.0 if act is A.ZERO else 1.0))
    return rows_frames(Head(kind, 1, CLIENT, sequence), parts)


def number_of(place: int) -> int:
    """The sequence number of an act."""
    return sum(act not in UNNUMBERED for act in STORY[: place + 1])


def value_after(outcomes: dict[int, str | None], last: int) -> float | None:
    """What every row is after the acts up to ``last``; None before there are rows."""
    value: float | None = None
    for place, outcome in sorted(outcomes.items()):
        act = STORY[place]
        if place > last or outcome != "done":
            continue
        if act is A.ZERO:
            value = 0.0
        elif act is A.ADD:
            assert value is not None
            value += 1.0
        elif act in (A.LOAD, A.LOAD_STAGED):
            value = LOADED
    return value


def make_save(path: Path) -> Path:
    """The save that is loaded."""
    store = Store(1 << 20, 1 << 20)
    handler = Handler(store, None, SaveRoot(path.parent))
    for sequence, spec in enumerate(SPECS, 1):
        handler.answer(attach_frames(Head(Kind.ATTACH, 1, CLIENT, sequence), spec))
    parts = [(n, spec, IDS, torch.full((3, spec.dim), LOADED), 0.0) for n, spec in enumerate(SPECS)]
    handler.answer(rows_frames(Head(Kind.WRITE, 1, CLIENT, 3), parts))
    later = handler.answer(pack_control(Head(Kind.SAVE, 1, CLIENT), {"path": str(path)}))
    assert isinstance(later, DeferredReply)
    later.work()
    return path


def play(scene: Scene, disk: FaultyDisk) -> Told:
    """Play the story in a forked process until it ends, one way or another."""
    scene.root.mkdir()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads; the child uses none
        pid = os.fork()
    if pid == 0:
        os.close(reader)
        _play_and_exit(scene, disk, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        told = _read(file.read().decode())
    os.waitpid(pid, 0)
    return told


def _play_and_exit(scene: Scene, disk: FaultyDisk, writer: int) -> None:
    """In the child. Tells everything at once, so that a kill takes nothing back."""

    def tell(**words: Any) -> None:
        os.write(writer, json.dumps(words).encode() + b"\n")

    logging.disable()
    files.disk = disk
    try:
        with contextlib.suppress(ServerStartError):
            player = Player(scene)
            for place in range(len(STORY)):
                tell(begun=place, token=player.token)
                try:
                    tell(place=place, outcome=player.do(place))
                except ServerStateError as error:
                    tell(ended=str(error))
                    player.durable.close()
                    break
        tell(operations=disk.count)
    except BaseException:
        tell(crash=traceback.format_exc())
    finally:
        os._exit(0)


def _read(text: str) -> Told:
    told = Told()
    for words in map(json.loads, text.splitlines()):
        if "begun" in words:
            told.outcomes[words["begun"]] = None
            told.tokens[words["begun"]] = words["token"]
        elif "place" in words:
            told.outcomes[words["place"]] = words["outcome"]
        else:
            for name, value in words.items():
                setattr(told, name, value)
    return told


def prove(scene: Scene, told: Told) -> None:
    """Start a server on what is left; nothing that was acknowledged is missing, or there twice."""
    assert not told.crash, told.crash
    outcomes = dict(told.outcomes)
    numbered = [place for place in range(len(STORY)) if STORY[place] not in UNNUMBERED]
    answered = [place for place in numbered if outcomes.get(place) is not None]
    asked = [place for place in numbered if place in outcomes]
    player = Player(scene)
    applied = player.store.clients.applied(CLIENT)
    assert len(answered) <= applied <= len(asked), "acknowledged, applied, sent"
    _check_save(scene, told)
    for place in numbered[len(answered) :]:  # as the client does; what is applied counts once
        player.token = told.tokens.get(place)
        outcomes[place] = player.do(place)
    _check(player.store, value_after(outcomes, len(STORY)))
    close_as_killed(player.durable)
    player = Player(scene)
    assert player.store.clients.applied(CLIENT) == len(numbered)
    _check(player.store, value_after(outcomes, len(STORY)))
    player.durable.close()
    left = {path.name.partition("-")[0] for path in scene.state.iterdir()}
    assert left == {"lock", "journal", "snapshot"}


def _check(store: Store, value: float | None) -> None:
    for table in store.tables:
        if value is None:
            assert not table.count
            continue
        assert table.count == len(IDS)
        rows = table.storage.kept()[0]
        assert torch.equal(rows, torch.full_like(rows, value)), (rows, value)


def _check_save(scene: Scene, told: Told) -> None:
    """What is in the directory of saves: the last that was acknowledged, or a later one, whole."""
    begun = [place for place in told.outcomes if STORY[place] is A.SAVE]
    done = [place for place in begun if told.outcomes[place] == "done"]
    if not done:
        return
    store = Store(1 << 20, 1 << 20)
    for spec in SPECS:
        store.create(spec, WHOLE)
    build_aside(store, find_save(store, scene.save))()
    found = {float(row) for table in store.tables for row in table.storage.kept()[0].flatten()}
    allowed = {value_after(told.outcomes, place) for place in begun[begun.index(done[-1]) :]}
    assert len(found) == 1, "tables of different saves"
    assert found <= allowed
