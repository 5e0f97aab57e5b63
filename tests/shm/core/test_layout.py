"""What is written down twice about the native core, compared: bytes, and the fields of records."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.native.extension import native
from paceline.shm.core.pages import HEAD_BYTES, PAGE_BYTES, RECORD_BYTES, Field
from tests.shm.attach import damage

NATIVE = Path(__file__).parents[3] / "src" / "paceline" / "native" / "group"
COMPILER = shutil.which(os.environ.get("CC", "cc"))
PROGRAM = """
#include <stdio.h>
#include "layout.h"
int main(void) {
    printf("ARRIVED=%zu VERDICT=%zu ROWS=%zu ROW_BYTES=%zu TICKETS=%zu\\n",
           offsetof(pl_control, barrier.arrived), offsetof(pl_control, verdict),
           offsetof(pl_control, row), sizeof(pl_row), offsetof(pl_row, ticket));
    printf("NOT_IN_ARENA=%llu control_bytes=%llu\\n", (unsigned long long)PL_NOT_IN_ARENA,
           (unsigned long long)pl_control_bytes(3));
    return 0;
}
"""


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
def test_the_bytes_that_ranks_share(tmp_path: Path) -> None:
    source, binary = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text("#include <stddef.h>\n" + PROGRAM)
    command = [str(COMPILER), "-std=gnu11", f"-I{NATIVE}", str(source), "-o", str(binary)]
    subprocess.run(command, check=True, timeout=60)
    text = subprocess.run([str(binary)], capture_output=True, text=True, timeout=60).stdout
    found = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}
    assert found.pop("NOT_IN_ARENA") == native.NOT_IN_ARENA
    assert found.pop("control_bytes") == native.control_bytes(3)
    assert found == {name: getattr(damage, name) for name in found}


def test_a_page_has_room_for_all_records() -> None:
    assert HEAD_BYTES + 2 * len(Field) * RECORD_BYTES <= PAGE_BYTES


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        ("Request", "kind dtype op root count seq"),
        (
            "Mismatch",
            "first second first_request second_request sent_bytes expected_bytes",
        ),
        ("Row", "life phase since_ns finished is_alive request"),
        ("Verdict", "end by about"),
    ],
)
def test_records_have_the_fields_that_python_reads(record: str, fields: str) -> None:
    assert getattr(native, record).__match_args__ == tuple(fields.split())


def test_only_files_that_group_h_lists_include_python() -> None:
    listed = set(re.findall(r"^ \*   (\w+\.c) ", (NATIVE / "group.h").read_text(), re.MULTILINE))
    found = {
        path.name
        for path in NATIVE.glob("*.c")
        if re.search(r"#include (<Python\.h>|\"group\.h\")", path.read_text())
    }
    assert listed == found
