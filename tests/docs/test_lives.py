"""The three pages 'The life of ...' name the functions that really run, in their order."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel
from paceline.native.extension import native
from paceline.testing import run_ranks
from tests.docs.hops import ROOT, Call, check_not_python, check_walk, recorded

# What Python does where the native core does not. A walk through C must not come by.
INSTEAD_OF_C = {
    ("ddp/autograd/hooks.py", "on_gradient"),
    ("ddp/reduce/copy_in.py", "_copy"),
    ("ps/server/dispatch.py", "answer"),
}
needs_native = pytest.mark.skipif(native is None, reason="the native extension is not built")


def train_one_step() -> list[Call]:
    """The third step: buckets have been rebuilt by then."""
    layers = [nn.Linear(600, 600) for _ in range(3)]  # 1.4 MB each: three buckets
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
    for _ in range(2):
        model(torch.randn(8, 600)).sum().backward()
    with recorded() as calls:
        model(torch.randn(8, 600)).sum().backward()
    return calls


@needs_native
def test_the_life_of_a_gradient() -> None:
    for calls in run_ranks(2, train_one_step):
        check_walk("how-it-works.md", calls)
        check_not_python(calls, INSTEAD_OF_C)


def reduce_one_tensor() -> list[Call]:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    with recorded() as calls:
        dist.all_reduce(tensor)
    return calls


@needs_native
def test_the_life_of_an_all_reduce() -> None:
    for calls in run_ranks(2, reduce_one_tensor, backend="paceline"):
        check_walk("life-of-an-all-reduce.md", calls)


@contextmanager
def traced_server(folder: Path) -> Iterator[str]:
    """A server with a journal; at the end it writes `server.json`."""
    address = f"ipc://{folder}/server"
    words = [str(folder / "server.json"), address, "--dir", str(folder / "state")]
    command = [sys.executable, "-m", "tests.docs.traced_server", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert "serving at" in server.stdout.readline()
            yield address
        finally:
            server.terminate()
            server.communicate(timeout=60)


@needs_native
def test_the_life_of_an_embedding_row(tmp_path: Path) -> None:
    ps = pytest.importorskip("paceline.ps", reason="pyzmq is not installed")
    with traced_server(tmp_path) as address, ps.connect([address]) as connection:
        table = ps.EmbeddingBag(
            100, 8, mode="sum", servers=connection, name="words", optimizer=ps.Adagrad(0.1)
        )
        table(torch.tensor([[1, 2, 2]])).sum().backward()
        table.flush()
        with recorded() as calls:
            table(torch.tensor([[1, 2, 2]])).sum().backward()
            table.flush()
    in_server = [tuple(call) for call in json.loads((tmp_path / "server.json").read_text())]
    check_walk("life-of-an-embedding-row.md", [*calls, *in_server])
    first_ns, last_ns = calls[0][0], calls[-1][0]
    attached = [call for call in in_server if call[0] < first_ns]
    assert any(call[1:] in INSTEAD_OF_C for call in attached), "the first push is Python's"
    check_not_python([call for call in in_server if first_ns < call[0] < last_ns], INSTEAD_OF_C)
