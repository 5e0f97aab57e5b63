"""``paceline verify``: equal runs are equal, and the first difference of others is named."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.cli import main
from paceline.errors import RecordsError
from paceline.observe.checksum_file import ChecksumWriter, RoundChecksums, read_file, read_run
from paceline.observe.run_folder import RunFolder
from paceline.report.verify import VerifyResult, compare_checkpoints, compare_runs

STEPS = 4


def train(folder: str, change: str = "") -> None:
    """Train, with one thing changed in step 2: the input of shard 5, its output, or the rate."""
    os.environ["PACELINE_RUN_DIR"] = folder
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), shards=8)
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
            ddp(micro).square().mean().backward()
        if change == "rate" and step == 2:
            optimizer.param_groups[0]["lr"] = 0.2
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


def recorded(path: Path, world: int, change: str = "") -> Path:
    from paceline.testing import run_ranks

    folder = RunFolder.create("train.py", path).path
    run_ranks(world, train, str(folder), change)
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("runs") / "one", 1)


def test_equal_on_another_number_of_ranks(reference: Path, tmp_path: Path) -> None:
    other = recorded(tmp_path / "three", 3)
    assert compare_runs(reference, other) == VerifyResult(True, f"equal: {STEPS} steps, 0 to 3")
    assert main(["verify", str(reference), str(other)]) == 0
    rounds = read_run(other)
    assert all(sorted(each.shards) == list(range(8)) for each in rounds.values())
    assert "1.running_mean" in rounds[0].tensors


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
