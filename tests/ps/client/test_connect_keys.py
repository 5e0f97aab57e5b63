"""``ps.connect`` over tcp: with the right key it works, with another the error says so at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline import ps
from paceline.errors import ServerError, ServerKeyError
from paceline.ps.protocol.keys import make_keys
from tests.ps.protocol.test_keys import tcp_server


@pytest.mark.usefixtures("fork_server")
def test_keys_are_needed_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    server, client = make_keys(tmp_path / "keys")
    _, strange = make_keys(tmp_path / "others")
    (strange / "server.pub").write_bytes((client / "server.pub").read_bytes())
    with tcp_server(server, tmp_path) as address:
        with ps.connect([address], keys=client) as servers:
            module = ps.Embedding(10, 4, servers=servers, name="t")
            module(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(ServerKeyError, match="does not accept") as caught:
            ps.connect([address], keys=strange, timeout_s=60)
        assert caught.value.address == address
        with pytest.raises(ServerError):
            ps.connect([address], timeout_s=1)


@pytest.mark.usefixtures("fork_server")
def test_the_key_of_another_server_is_named(tmp_path: Path) -> None:
    """The server cannot even read what is encrypted for another one, and just hangs up."""
    server, _ = make_keys(tmp_path / "keys")
    _, strange = make_keys(tmp_path / "others")
    with tcp_server(server, tmp_path) as address:
        with pytest.raises(ServerKeyError, match="the key does not fit") as caught:
            ps.connect([address], keys=strange, timeout_s=60)
        assert caught.value.address == address
    log = (tmp_path / "log").read_text()
    assert "its keys do not fit this server" in log
    assert len(log.splitlines()) < 10
