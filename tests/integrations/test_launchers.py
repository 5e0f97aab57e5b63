"""Jobs under mpirun and Slurm, for real, on one machine: the script has nothing to change."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integrations import slurm_cluster
from tests.integrations.table import torchrun_variables
from tests.required import needs, skip_without

EXAMPLES = Path(__file__).parents[2] / "examples"
KNOWS_TORCH_ONLY = Path(__file__).with_name("unedited.py")
DEADLINE_S = 250
pytestmark = pytest.mark.slow

Job = subprocess.CompletedProcess[str]


def check(result: Job) -> None:
    assert result.returncode == 0, result.stdout + result.stderr
    loss = re.findall(r"loss (\d\.\d+)", result.stdout)
    assert loss, result.stdout + result.stderr
    assert float(loss[-1]) < 0.1


def check_losses_are_torchs(run: Callable[[str], Job]) -> None:
    """Run the script with torch's class and with ours: the same losses, bit for bit."""
    told = []
    for patch in ("0", "1"):
        result = run(patch)
        # torch's own class may abort at exit: gloo_threads.py says why.
        assert result.returncode == 0 or (patch == "0" and result.stdout), result.stderr
        (line,) = [line for line in result.stdout.splitlines() if " [" in line]
        told.append(line.partition(" "))
    (theirs, _, their_losses), (ours, _, our_losses) = told
    assert (theirs, ours) == ("torch.nn.parallel.distributed", "paceline.ddp.wrapper")
    assert len(set(their_losses.split(", "))) > 1, "nothing was trained"
    assert their_losses == our_losses


NO_MPIRUN = "" if shutil.which("mpirun") else "needs mpirun (Debian: openmpi-bin)"


@skip_without("mpirun", NO_MPIRUN)
class TestMpirun:
    def run(self, script: Path, **env: str) -> Job:
        ranks = "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE"
        line = f'{ranks} LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK exec "$@"'
        env |= {**torchrun_variables(), "OMP_NUM_THREADS": "1"}
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
        command += [word for name in env for word in ("-x", name)]
        command += ["bash", "-c", line, "rank", sys.executable, str(script)]
        return subprocess.run(
            command, env={**os.environ, **env}, capture_output=True, text=True, timeout=DEADLINE_S
        )

    def test_it_trains(self) -> None:
        check(self.run(EXAMPLES / "train_mlp.py"))

    def test_the_losses_are_torchs(self) -> None:
        check_losses_are_torchs(lambda patch: self.run(KNOWS_TORCH_ONLY, PACELINE_PATCH=patch))


@pytest.mark.may_leave("children")  # slurmstepd ends a moment after its job
@skip_without("slurm", slurm_cluster.missing())
class TestSlurm:
    def run(self, env: dict[str, str], folder: Path, *command: str) -> Job:
        env = {**env, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=DEADLINE_S, cwd=folder
        )

    def submit(self, env: dict[str, str], folder: Path, script: Path) -> Job:
        """Wait for the job; return what it has written."""
        output = folder / "job.out"
        batch = ["--wait", f"--output={output}", str(EXAMPLES / "slurm.sbatch"), str(script)]
        result = self.run(env, folder, "sbatch", *batch)
        result.stdout += output.read_text()
        return result

    def test_sbatch(self, tmp_path: Path) -> None:
        with slurm_cluster.cluster(tmp_path) as env:
            check(self.submit(env, tmp_path, EXAMPLES / "train_mlp.py"))
            check_losses_are_torchs(
                lambda patch: self.submit(
                    {**env, "PACELINE_PATCH": patch}, tmp_path, KNOWS_TORCH_ONLY
                )
            )

    def test_srun(self, tmp_path: Path) -> None:
        """Without a batch script; MASTER_PORT is all that one sets besides ranks."""
        ranks = "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID"
        command = ["srun", "--ntasks=2", "--ntasks-per-node=2", "bash", "-c"]
        command += [f'{ranks} exec "$@"', "rank", sys.executable, str(KNOWS_TORCH_ONLY)]
        with slurm_cluster.cluster(tmp_path) as env:

            def run(patch: str) -> Job:
                own = {**env, **torchrun_variables(), "PACELINE_PATCH": patch}
                return self.run(own, tmp_path, *command)

            check_losses_are_torchs(run)

    @needs("lightning")
    def test_srun_of_lightning(self, tmp_path: Path) -> None:
        """Lightning asks Slurm itself who it is."""
        script = str(EXAMPLES / "lightning_fabric.py")
        command = ["srun", "--ntasks=2", "--ntasks-per-node=2", sys.executable, script]
        with slurm_cluster.cluster(tmp_path) as env:
            check(self.run(env, tmp_path, *command))
