"""``paceline verify``: equal runs are equal, and the first difference of others is named."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline import Shards
from paceline.cli import main
from paceline.errors import RecordsError
from paceline.observe.checksum_file import ChecksumWriter, RoundChecksums, read_file, read_run
from paceline.observe.run_folder import RunFolder
from paceline.report.verify import VerifyResult, compare_checkpoints, compare_runs
from paceline.testing import run_ranks
from tests.shards import trainings

STEPS = 4


def train(folder: str, change: str = "", shards: int = 8, gradients_every: int = 100) -> None:
    """Train, with one thing changed in step 2: of shard 5, or the rate; or in the last step."""
    os.environ["PACELINE_RUN_DIR"] = folder
    torch.manual_seed(0)
    policy = Shards(shards, checksum_gradients_every=gradients_every)
    ddp = DDP(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), shards=policy)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    owned = ddp.shard_shares.owned
    for step in range(STEPS):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        if change == "input" and step == 2:
            x[5 * 2] += 1e-3
        batch = x[owned.start * 2 : owned.stop * 2]
        for shard, micro in zip(owned, ddp.shards(batch), strict=True):
            if change == "output" and step == 2 and shard == 5:
                micro *= 2  # behind the back of the record
            loss = ddp(micro).square().mean()
            (loss * (2 if change == "loss" and step == 2 and shard == 5 else 1)).backward()
        if (change, step) in (("rate", 2), ("last rate", STEPS - 1)):
            optimizer.param_groups[0]["lr"] = 0.2
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


def recorded(
    path: Path, world: int, change: str = "", shards: int = 8, gradients_every: int = 100
) -> Path:
    folder = RunFolder.create("train.py", path).path
    run_ranks(world, train, str(folder), change, shards, gradients_every)
    return folder


EQUAL = f"equal: {STEPS} steps, 0 to 3, and what the last one has made"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("runs") / "one", 1)


def test_equal_on_another_number_of_ranks(reference: Path, tmp_path: Path) -> None:
    other = recorded(tmp_path / "three", 3)
    assert compare_runs(reference, other) == VerifyResult(True, EQUAL)
    assert main(["verify", str(reference), str(other)]) == 0
    (rounds,) = read_run(other)
    assert sorted(rounds) == list(range(STEPS + 1))
    for number, each in rounds.items():
        assert sorted(each.shards) == (list(range(8)) if number < STEPS else [])
        assert sorted(each.gradients) == (list(range(8)) if number == 0 else [])
        assert "1.running_mean" in each.tensors
    assert set(rounds[0].gradients[5]) == {"1.bias", "1.weight", "0.bias", "0.weight"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("input", "step 2, shard 5: its input differs"),
        ("output", "step 2, shard 5: its output, with the same input, differs"),
    ],
)
def test_a_shard_is_named(
    reference: Path, tmp_path: Path, change: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = recorded(tmp_path / "other", 2, change)
    assert main(["verify", str(reference), str(other)]) == 1
    assert text in capsys.readouterr().out
    found = compare_runs(reference, other)
    assert (found.round, found.shard) == (2, 5)


def test_an_update_is_named(reference: Path, tmp_path: Path) -> None:
    found = compare_runs(reference, recorded(tmp_path / "other", 1, "rate"))
    assert found.round == 3
    assert found.names[:2] == ("0.weight", "0.bias")
    assert "step 2, or its update, made them so" in found.text
    assert "checksum_gradients_every=1" in found.text


def test_the_last_update_is_compared_too(reference: Path, tmp_path: Path) -> None:
    found = compare_runs(reference, recorded(tmp_path / "other", 2, "last rate"))
    assert (found.round, found.shard) == (STEPS, None)
    assert found.text.startswith("0.weight, 0.bias, 1.weight, 1.bias differ at the end: step 3, or")


def test_gradients_of_a_shard_are_named(tmp_path: Path) -> None:
    """Where input and output of all shards are equal."""
    folders = [
        recorded(tmp_path / f"{world}{change}", world, change, gradients_every=1)
        for world, change in ((1, ""), (3, "loss"), (2, "rate"))
    ]
    found = compare_runs(*folders[:2])
    assert (found.round, found.shard) == (2, 5)
    assert set(found.names) >= {"0.weight", "1.weight", "1.bias"}
    assert "step 2, shard 5: its gradients of" in found.text
    found = compare_runs(folders[0], folders[2])
    assert found.round == 3
    assert "the gradients of each shard of step 2 are equal" in found.text


GRADIENT_CASES = ["embedding", "unused", "weighted", "copies", "torch's views", "clamped", "synced"]


def train_cases(folders: dict[str, str]) -> dict[str, str]:
    """Train; return what each case ends with."""
    found = {}
    for name, folder in folders.items():
        os.environ["PACELINE_RUN_DIR"] = folder
        found[name] = trainings.train(trainings.CASES[name], 2)
    return found


def test_gradients_are_each_shards_own(tmp_path: Path) -> None:
    """At any number of ranks; and to look at them changes no bit."""
    expected = run_ranks(1, trainings.train_all, GRADIENT_CASES, 2, ["c10d"])[0]
    runs = []
    for world in (1, 3):
        made = {n: RunFolder.create("a.py", tmp_path / f"{n}{world}").path for n in GRADIENT_CASES}
        for told in run_ranks(world, train_cases, {n: str(path) for n, path in made.items()}):
            assert list(told.values()) == list(expected.values())
        runs.append(made)
    for name, case in ((name, trainings.CASES[name]) for name in GRADIENT_CASES):
        one, three = (read_run(made[name])[0] for made in runs)
        assert one[0].gradients == three[0].gradients, name
        assert sorted(one[0].gradients) == list(range(case.shards)), name
        distinct = {tuple(each.values()) for each in one[0].gradients.values()}
        assert len(distinct) > case.shards // 2, name
        assert compare_runs(runs[0][name], runs[1][name]).is_equal, name


def test_another_number_of_shards(reference: Path, tmp_path: Path) -> None:
    found = compare_runs(reference, recorded(tmp_path / "other", 1, shards=4))
    assert not found.is_equal
    assert "has 8 shards" in found.text
    assert "has 4" in found.text


def test_what_was_not_recorded_is_said(reference: Path, tmp_path: Path) -> None:
    """A rank's file is gone, or has fewer steps."""
    other = recorded(tmp_path / "other", 2)
    lines = (other / "rank1.checksums").read_text().splitlines(keepends=True)
    (other / "rank1.checksums").write_text("".join(lines[:3]))
    found = compare_runs(reference, other)
    assert found.is_equal
    assert found.text.endswith("has no checksums of shards 4, 5, 6, 7 in 1 of them")
    (other / "rank0.checksums").unlink()
    found = compare_runs(reference, other)
    assert found.text.startswith("equal: 3 steps, 0 to 2; 1 steps are recorded in one of the two")
    assert "has no parameters of 3 of them" in found.text
    (other / "rank1.checksums").unlink()
    with pytest.raises(RecordsError, match="has no checksums"):
        compare_runs(reference, other)


def train_two(folder: str, change: str = "") -> None:
    """A generator and a discriminator, each with shards; the latter is frozen meanwhile."""
    os.environ["PACELINE_RUN_DIR"] = folder
    torch.manual_seed(0)
    generator = DDP(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1)), shards=6)
    judge = DDP(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1)), shards=6)
    rate = 0.2 if change else 0.1
    optimizers = [
        torch.optim.SGD(generator.parameters(), lr=0.1),
        torch.optim.SGD(judge.parameters(), lr=rate),
    ]
    owned = generator.shard_shares.owned
    for step in range(STEPS):
        x = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))
        batch = x[owned.start * 2 : owned.stop * 2]
        generator.eval()
        for micro in judge.shards(batch):
            with torch.no_grad():
                made = generator(micro[:, :3])
            (judge(made).mean() - judge.module(micro[:, 3:]).detach().mean()).backward()
        optimizers[1].step()
        generator.train()
        judge.requires_grad_(False)
        for micro in generator.shards(batch):
            judge(generator(micro[:, :3])).mean().backward()
        judge.requires_grad_(True)
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    dist.barrier()


def test_two_wrappers(tmp_path: Path) -> None:
    folders = []
    for world, change in ((1, ""), (3, ""), (2, "rate")):
        folders.append(RunFolder.create("train.py", tmp_path / f"{world}").path)
        run_ranks(world, train_two, str(folders[-1]), change)
    assert (folders[0] / "rank0.1.checksums").stat().st_mode & 0o777 == 0o600
    found = compare_runs(*folders[:2])
    assert found.is_equal, found
    assert found.text == f"wrapper 1: {EQUAL}\nwrapper 2: {EQUAL}"
    found = compare_runs(folders[0], folders[2])
    assert not found.is_equal
    assert (found.round, found.shard) == (0, 0)  # through another discriminator
    assert found.text.startswith("wrapper 1: step 0, shard 0: its gradients of")
    for path in folders[1].glob("rank*.1.checksums"):
        path.unlink()
    assert "has 2 wrappers with shards" in compare_runs(*folders[:2]).text


def test_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("a.pt", "b.pt", "c.pt")]
    state = {"model": {"w": torch.zeros(3), "n": 1}, "opt": [torch.ones(2), 0.5]}
    torch.save(state, paths[0])
    torch.save(state, paths[1])
    state["model"] = {"w": torch.tensor([0.0, -0.0, 0.0]), "n": 1}  # equal as numbers
    torch.save(state, paths[2])
    assert main(["verify", *paths[:2]]) == 0
    assert main(["verify", *paths[1:]]) == 1
    assert "model.w differ, of 4" in capsys.readouterr().out
    assert compare_checkpoints(Path(paths[0]), Path(paths[2])).names == ("model.w",)


def quantized(zero: int) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, zero, torch.qint8)


STATES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "a sign": lambda: ({"rate": 0.0}, {"rate": -0.0}),
    "a type": lambda: ({"n": 1}, {"n": True}),
    "a name": lambda: ({"a": 1, "b": None}, {"a": 1}),
    "nothing in it": lambda: ({"a": 1, "state": {}}, {"a": 1}),
    "a shape": lambda: ({"w": torch.zeros(2)}, {"w": torch.zeros(2, 1)}),
    "a conjugate": lambda: ({"w": torch.ones(2) * 1j}, {"w": (torch.ones(2) * 1j).conj()}),
    "rows": lambda: ({"w": torch.eye(2).to_sparse_csr()}, {"w": -torch.eye(2).to_sparse_csr()}),
    "a zero point": lambda: ({"w": quantized(0)}, {"w": quantized(1)}),
}


@pytest.mark.filterwarnings("ignore")  # of torch, about sparse rows and quantized tensors
@pytest.mark.parametrize("name", STATES)
def test_checkpoints_that_differ_in(name: str, tmp_path: Path) -> None:
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for state, path in zip(STATES[name](), paths, strict=True):
        torch.save(state, path)
    assert not compare_checkpoints(*paths).is_equal
    assert compare_checkpoints(paths[0], paths[0]).is_equal


def test_nan_is_itself(tmp_path: Path) -> None:
    torch.save({"w": torch.full((2,), torch.nan), "loss": float("nan")}, tmp_path / "a.pt")
    assert compare_checkpoints(tmp_path / "a.pt", tmp_path / "a.pt").is_equal


def test_damaged_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(3), "names": ["a", "b"]}, path)
    data = path.read_bytes()
    for place in range(0, len(data), 41):
        for damaged in (data[:place], data[:place] + b"\xff\x00" + data[place + 2 :]):
            path.write_bytes(damaged)
            with contextlib.suppress(RecordsError):
                compare_checkpoints(path, path)


def test_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text("{}")
    assert main(["verify", str(tmp_path / "a"), str(tmp_path / "a")]) == 2
    assert "has no checksums" in capsys.readouterr().err
    (tmp_path / "bad.pt").write_bytes(b"nothing")
    assert main(["verify", *[str(tmp_path / "bad.pt")] * 2]) == 2


def test_a_file_is_bounded_and_covers_the_whole_run(tmp_path: Path) -> None:
    writer = ChecksumWriter(tmp_path, 0, limit=4000)
    for number in range(1000):
        if writer.wants(number):
            writer.write(RoundChecksums(number, {"w": f"{number:016x}"}, {1: ("a", "b")}))
    path = tmp_path / "rank0.checksums"
    assert path.stat().st_size <= 4200
    assert path.stat().st_mode & 0o777 == 0o600
    found = sorted(read_file(path))
    assert found[0] == 0
    assert found[-1] > 900
    assert len({b - a for a, b in itertools.pairwise(found)}) == 1


def test_a_line_that_was_cut_off(tmp_path: Path) -> None:
    writer = ChecksumWriter(tmp_path, 0)
    writer.write(RoundChecksums(0))
    path = tmp_path / "rank0.checksums"
    path.write_text(path.read_text() + '{"round": 1, "ten')
    assert sorted(read_file(path)) == [0]
    path.write_text("nonsense\n")
    with pytest.raises(RecordsError, match="line 1 is no record of checksums"):
        read_file(path)
