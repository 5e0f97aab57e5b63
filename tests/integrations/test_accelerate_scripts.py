"""Accelerate's own distributed tests, from its wheel, with our Accelerator in the place of theirs.

The wheel has five that need two processes and no GPU. ``test_ddp_comm_hook.py`` gives device_ids
to a module on the CPU, which torch refuses as well.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.required import needs

pytestmark = [needs("accelerate"), pytest.mark.slow]
DEADLINE_S = 280
RUNNER = Path(__file__).with_name("with_our_accelerator.py")
WRAPS = {
    "test_script.py": True,
    "test_sync.py": True,
    "test_ops.py": False,  # only collectives, on Accelerate's state
    # With Accelerate's own class it hangs on CPUs: joining uneven inputs has no effect there.
    "test_distributed_data_loop.py": True,
}


@pytest.mark.parametrize("script", WRAPS)
def test_passes(script: str) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [sys.executable, *launcher, str(RUNNER), script, *([] if WRAPS[script] else ["state"])],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    wrappers = r"\{'paceline': \d+\}" if WRAPS[script] else r"\{\}"
    used = rf"^used: groups \{{'paceline': \d+\}}, wrappers {wrappers}$"
    assert len(re.findall(used, result.stdout, re.MULTILINE)) == 2, result.stdout[-3000:]
