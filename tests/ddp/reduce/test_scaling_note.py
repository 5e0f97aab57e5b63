"""[Note: scaling] names every file that scales gradients."""

from __future__ import annotations

import re
from pathlib import Path

import paceline
from paceline.ddp.reduce import gradient_access

SOURCE = Path(paceline.__file__).parent
SCALES = re.compile(r"\.(?:mul_|div_)\(|_foreach_mul_|scale_into\(|\* factor\b")
# They multiply sums of bits, buffers, and gradients that are reduced and clipped.
OTHERS = {"checksum.py", "shard_buffer_exchange.py", "clip.py"}


def test_the_note_names_all_that_scale() -> None:
    rooms = ("buckets", "ddp", "shards", "native/wrapper")
    files = [path for room in rooms for path in (SOURCE / room).rglob("*.[pc]*")]
    sources = [path for path in files if path.suffix in {".py", ".c"}]
    scaling = {path.name for path in sources if SCALES.search(path.read_text())}
    note = (gradient_access.__doc__ or "").split("[Note: scaling]")[1]
    named = set(re.findall(r"\w+\.(?:py|c)\b", note)) | {"gradient_access.py"}
    assert scaling - OTHERS - named == set(), "add it to the note"
    assert scaling >= OTHERS
    assert named - scaling == {"weights.py"}, "which has the bucket scale itself"
