"""No framework is imported unless a script uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Whoever imports one of these from here on gets an error, whether it is installed or not.
REFUSE = """
import sys
class Refuses:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {refused}:
            raise RuntimeError(f"{{name}} is imported")
sys.meta_path.insert(0, Refuses())
"""
FRAMEWORKS = {
    "accelerate",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "ray",
    "transformers",
}
TRAIN = """
import torch
import paceline
import paceline.cli, paceline.elastic, paceline.observe, paceline.integrations
from paceline.integrations import lightning, torch_debug, torch_patch
store = torch.distributed.HashStore()
torch.distributed.init_process_group("paceline", rank=0, world_size=1, store=store)
with paceline.patch_torch():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
del model
torch.distributed.destroy_process_group()
"""


def run(code: str, refused: set[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", REFUSE.format(refused=refused) + code],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_none_by_training() -> None:
    result = run(TRAIN, FRAMEWORKS)
    assert result.returncode == 0, result.stderr


def test_an_import_would_be_noticed() -> None:
    result = run("import accelerate.utils", FRAMEWORKS)
    assert "RuntimeError: accelerate is imported" in result.stderr
