"""Layouts that Python and C both write down: each field begins at the same byte in both."""

from __future__ import annotations

import ctypes
import re
import struct

import numpy as np
import pytest

from paceline.native import extension
from paceline.ps.client.batch import BATCH
from paceline.ps.client.message_plan import PLAN_HEAD
from paceline.ps.protocol import wire
from paceline.ps.state.clients import ACCOUNT
from paceline.ps.state.native_messages import TALLY
from paceline.ps.state.native_table import ColumnFields, EntryFields

pytestmark = pytest.mark.skipif(
    extension.native is None, reason="needs the native core: a C compiler"
)


def offsets(layout: str | type[ctypes.Structure]) -> list[int]:
    """Where each field of a struct begins, and its size."""
    if not isinstance(layout, str):
        fields = [getattr(layout, name).offset for name, _ in layout._fields_]
        return [*fields, ctypes.sizeof(layout)]
    codes = re.findall(r"(\d*)([a-zA-Z])", layout.removeprefix("<"))
    each = [f"{n}s" if code == "s" else code for n, code in codes for _ in range(repeats(n, code))]
    return [struct.calcsize("<" + "".join(each[:end])) for end in range(len(each) + 1)]


def repeats(number: str, code: str) -> int:
    return 1 if code == "s" or not number else int(number)


def test_layouts_are_those_of_the_native_core() -> None:
    layouts = {
        "pl_head": wire.HEAD.format,
        "pl_record": wire.SECTION.format,
        "pl_entry": EntryFields,
        "pl_column": ColumnFields,
        "pl_account": ACCOUNT.format,
        "pl_tally": TALLY.format,
        "pl_batch": BATCH.format,
        "pl_plan_head": PLAN_HEAD.format,
    }
    found = {
        name: np.frombuffer(each, np.uint32).tolist()
        for name, each in extension.native.layouts().items()
    }
    assert found == {name: offsets(layout) for name, layout in layouts.items()}
