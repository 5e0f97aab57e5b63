"""The bytes of messages: what is packed comes back, and anything else is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.ps.protocol.wire import (
    CONTROL_BYTES,
    DATA,
    SEQUENCED,
    Dtype,
    Form,
    Head,
    Kind,
    Message,
    Mode,
    Section,
    WireError,
    pack_control,
    read_head,
    unpack,
)
from tests.examples import examples
from tests.ps.data_messages import pack_data

numbers = st.integers(0, 2**64 - 1)
frames_of_noise = st.lists(st.binary(max_size=300), max_size=5)


@st.composite
def heads(draw: st.DrawFn, kinds: frozenset[Kind]) -> Head:
    kind = draw(st.sampled_from(sorted(kinds)))
    sequence = draw(st.integers(1, 2**64 - 1)) if kind in SEQUENCED else 0
    return Head(kind, draw(numbers), draw(st.binary(min_size=16, max_size=16)), sequence)


@st.composite
def sections(draw: st.DrawFn) -> Section:
    mode = draw(st.sampled_from(Mode))
    form = Form.ROWS if mode is Mode.NONE else Form.BAGS
    return Section(
        draw(st.integers(0, 2**32 - 1)),
        form,
        draw(st.sampled_from(Dtype)),
        draw(st.integers(0, 20)),
        draw(st.integers(0, 5)) if form is Form.BAGS else 0,
        mode,
        draw(st.booleans()) if mode is Mode.SUM else False,
        draw(st.floats(allow_nan=False)),
    )


@given(heads(frozenset(Kind) - DATA), st.dictionaries(st.text(max_size=9), numbers, max_size=4))
def test_control_comes_back(head: Head, control: dict[str, int]) -> None:
    found = unpack(pack_control(head, control))
    assert (found.head, found.control) == (head, control)
    assert read_head(pack_control(head, control)[0])[0] == head


@given(heads(DATA), st.lists(sections(), max_size=6), st.binary(max_size=64))
def test_data_comes_back(head: Head, shares: list[Section], values: bytes) -> None:
    count = 0 if head.kind is Kind.FOUND else sum(share.integers for share in shares)
    integers = np.arange(count)
    found = unpack(pack_data(head, shares, integers.tobytes(), values))
    assert found.head == head
    assert list(found.sections) == shares
    assert np.array_equal(found.integers, integers)
    assert bytes(found.values) == values


@settings(max_examples=examples(500))
@given(frames_of_noise)
def test_noise_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        unpack(frames)


@settings(max_examples=examples(1000))
@given(
    st.one_of(heads(frozenset(Kind) - DATA), heads(DATA)),
    st.integers(0, 200),
    st.binary(min_size=1, max_size=8),
    frames_of_noise,
)
def test_any_change_is_read_or_refused(
    head: Head, place: int, change: bytes, more: list[bytes]
) -> None:
    """Never anything but a message or a WireError, and never more memory than the frames have."""
    share = Section(0, Form.ROWS, Dtype.FLOAT32, 2)
    if head.kind in DATA:
        frames = pack_data(head, [share], bytes(16), bytes(32))
    else:
        frames = pack_control(head, {"nonce": 1})
    first = bytearray(frames[0])
    first[place : place + len(change)] = change
    try:
        found = unpack([first, *frames[1:], *more])
    except WireError:
        return
    assert isinstance(found, Message)
    assert len(found.integers) * 8 <= 16


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"[" * 60_000, "JSON"),
        (b'{"a":' * 5_000, "JSON"),
        (b"[1]", "no object"),
        (b'"x"', "no object"),
        (b"\xff", "JSON"),
        (b"{" + b" " * CONTROL_BYTES + b"}", "bytes of JSON"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "JSON"),
    ],
)
def test_json_that_is_too_deep_or_too_much(text: bytes, match: str) -> None:
    head = pack_control(Head(Kind.HELLO, 1, bytes(16)), {})[0][:48]
    with pytest.raises(WireError, match=match):
        unpack([bytes(head) + text])


def test_a_control_message_has_a_limit_on_both_sides() -> None:
    with pytest.raises(WireError):
        pack_control(Head(Kind.DONE, 1, bytes(16)), {"text": "x" * CONTROL_BYTES})
    assert json.loads(pack_control(Head(Kind.DONE, 1, bytes(16)), {})[0][48:]) == {}


@pytest.mark.parametrize("version", [0, 2, 999])
def test_another_version_says_so(version: int) -> None:
    frame = bytearray(pack_control(Head(Kind.HELLO, 1, bytes(16)), {})[0])
    frame[4:6] = version.to_bytes(2, "little")
    with pytest.raises(WireError, match=f"version {version} of the protocol; this side speaks 1"):
        unpack([frame])
