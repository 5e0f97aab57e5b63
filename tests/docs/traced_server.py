"""A parameter server that writes down which functions it ran; a process of `test_lives.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from paceline.cli import main
from tests.docs.hops import recorded

if __name__ == "__main__":
    trace, *words = sys.argv[1:]
    with recorded() as calls:
        code = main(["ps", "serve", *words])
    Path(trace).write_text(json.dumps(calls))
    sys.exit(code)
