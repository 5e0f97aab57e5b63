"""A Slurm cluster of one node, in a folder: munged, slurmctld and slurmd, ended with the block."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.system import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "scontrol")
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
DEADLINE_S = 90

CONFIGURATION = """
ClusterName=paceline-test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Return why there can be no cluster here, or nothing."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if lacking:
        return f"needs {', '.join(lacking)} (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "needs root"


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the environment in which Slurm's commands mean this cluster."""
    folder.chmod(0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    text = CONFIGURATION.format(
        folder=folder,
        host=socket.gethostname().partition(".")[0],
        controller_port=free_port(),
        node_port=free_port(),
    )
    configuration = folder / "slurm.conf"
    configuration.write_text(text)
    env = {**os.environ, "SLURM_CONF": str(configuration), "PATH": PATH}
    munge = ["munged", "--foreground", "--force", f"--key-file={key}"]
    munge += [f"--{n}={folder}/munge.{n[:4]}" for n in ("pid-file", "log-file", "seed-file")]
    commands = [
        [*munge, f"--socket={folder}/munge.socket"],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D"],
    ]
    with contextlib.ExitStack() as stack:
        for command in commands:
            stack.enter_context(_daemon(command, env, folder))
            _wait_for(folder / "munge.socket")
        _wait_idle(env, folder)
        yield env


@contextlib.contextmanager
def _daemon(command: list[str], env: dict[str, str], folder: Path) -> Iterator[None]:
    with (folder / f"{command[0]}.out").open("w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(path: Path) -> None:
    end = time.monotonic() + DEADLINE_S
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path} did not appear")
        time.sleep(0.1)


def _wait_idle(env: dict[str, str], folder: Path) -> None:
    end = time.monotonic() + DEADLINE_S
    while True:
        told = subprocess.run(["sinfo", "-h", "-o", "%T"], env=env, capture_output=True, text=True)
        if told.stdout.strip() == "idle":
            return
        if time.monotonic() > end:
            logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
            raise TimeoutError(f"no idle node: {told.stdout} {told.stderr}\n{logs}")
        time.sleep(0.2)
