"""Jobs under mpirun and Slurm, for real, on one machine: the script has nothing to change."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations import slurm_cluster
from tests.integrations.table import needs, torchrun_variables

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 250
pytestmark = pytest.mark.slow


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Debian: openmpi-bin)")
def test_mpirun() -> None:
    variables = torchrun_variables()
    ranks = "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE"
    script = f'{ranks} LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK exec "$@"'
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    command += [word for name in ("MASTER_ADDR", "MASTER_PORT") for word in ("-x", name)]
    command += ["bash", "-c", script, "rank", sys.executable, str(EXAMPLES / "train_mlp.py")]
    env = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    check(result)


def check(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0, result.stdout + result.stderr
    loss = re.findall(r"loss (\d\.\d+)", result.stdout)
    assert loss, result.stdout + result.stderr
    assert float(loss[-1]) < 0.1


@pytest.mark.may_leave("children")  # slurmstepd ends a moment after its job
@pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "-")
class TestSlurm:
    def run(self, tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
        with slurm_cluster.cluster(tmp_path) as env:
            env |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
            return subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=DEADLINE_S, cwd=tmp_path
            )

    def test_sbatch(self, tmp_path: Path) -> None:
        output = tmp_path / "job.out"
        batch = [str(EXAMPLES / "slurm.sbatch"), str(EXAMPLES / "train_mlp.py")]
        result = self.run(tmp_path, "sbatch", "--wait", f"--output={output}", *batch)
        result.stdout += output.read_text()
        check(result)

    @needs("lightning")
    def test_srun_of_lightning(self, tmp_path: Path) -> None:
        """Lightning asks Slurm itself who it is."""
        script = str(EXAMPLES / "lightning_fabric.py")
        command = ["srun", "--ntasks=2", "--ntasks-per-node=2", sys.executable, script]
        check(self.run(tmp_path, *command))
