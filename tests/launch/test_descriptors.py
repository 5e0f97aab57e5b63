"""The launcher has as many descriptors as its ranks need, and gives them back."""

from __future__ import annotations

import resource

import pytest

from paceline.errors import ConfigurationError
from paceline.launch import descriptors
from paceline.launch.descriptors import descriptors_for

Limits = list[tuple[int, int]]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """What was set; the system has 256 and allows 1024."""
    found = [(256, 1024)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: found[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: found.append(pair))
    monkeypatch.setattr(descriptors, "_in_use", lambda: 10)
    return found


def test_few_ranks_change_nothing(limits: Limits) -> None:
    with descriptors_for(4):
        pass
    assert limits == [(256, 1024)]


def test_many_ranks_raise_the_limit_meanwhile(limits: Limits) -> None:
    with descriptors_for(100):
        assert limits[-1][0] >= 410
        assert limits[-1][1] == 1024
    assert limits[-1] == (256, 1024)


@pytest.mark.parametrize(("ranks", "says"), [(192, "launcher"), (300, "forked from")])
def test_what_the_system_does_not_allow(
    ranks: int, says: str, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits.append((256, 512))
    with pytest.raises(ConfigurationError, match=f"{ranks} ranks need .*{says}.*ulimit"):
        descriptors_for(ranks).__enter__()
    assert limits[-1] == (256, 512)


def test_for_real() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with descriptors_for(8):
        pass
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    assert descriptors._in_use() > 0
