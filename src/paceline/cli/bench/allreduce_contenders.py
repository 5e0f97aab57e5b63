"""Who can take part in ``paceline bench allreduce``: what is installed here, and tried once.

No torch. An MPI is offered only after a program has run under its launcher and said that it is
that MPI: several of them install launchers of the same name.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import ConfigurationError

GLOO, PACELINE, DEEPSPEED = "gloo", "paceline", "deepspeed"
PROBE = "from mpi4py import MPI; print(MPI.Get_library_version())"
PROBE_TIMEOUT_S = 60.0
BUILD = (
    "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as Builder; "
    "Builder().load(verbose=False)"
)
BUILD_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Mpi:
    """One MPI.

    Attributes:
        name: What tables call it; also what mpi4py calls its binary interface.
        launchers: Programs that may start it, the surest first.
        options: Of the launcher.
        says: What its library says about itself.
    """

    name: str
    launchers: tuple[str, ...]
    options: tuple[str, ...]
    says: str

    def command(self, launcher: str, ranks: int) -> list[str]:
        """Return the words that start a program on so many ranks, without the program."""
        options = list(self.options)
        if self.name == "openmpi":
            options += ["--personality", "ompi"] if launcher.endswith("prterun") else []
            options += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [launcher, *options, "-n", str(ranks)]

    def environ(self, launcher: str) -> dict[str, str]:
        """Return the environment: a wheel's launcher and library must find each other."""
        found = {**os.environ, "MPI4PY_MPIABI": self.name, "GLOO_SOCKET_IFNAME": "lo"}
        if Path(launcher).parent == _beside():
            found["PATH"] = search_path()
            libraries = [str(Path(sys.prefix, "lib")), os.environ.get("LD_LIBRARY_PATH", "")]
            found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
            for name in ("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"):
                found[name] = sys.prefix
        return found


MPIS = {
    "openmpi": Mpi(
        "openmpi",
        ("prterun", "mpirun.openmpi", "mpirun"),
        ("--oversubscribe", "--bind-to", "none"),
        "Open MPI",
    ),
    "mpich": Mpi("mpich", ("mpiexec.hydra", "mpirun.mpich", "mpirun"), (), "MPICH"),
}
CONTENDERS = (GLOO, PACELINE, *MPIS, DEEPSPEED)


@dataclass
class Chosen:
    """Who takes part.

    Attributes:
        in_process: Contenders that share one set of ranks: gloo, Paceline, DeepSpeed.
        mpis: The launcher of each MPI.
        missing: Why the others do not.
    """

    in_process: list[str] = field(default_factory=lambda: [GLOO, PACELINE])
    mpis: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def find_contenders(wanted: Sequence[str] | None) -> Chosen:
    """Return who takes part; gloo always does, because the others are compared with it.

    Args:
        wanted: Names; None: everybody who is installed.

    Raises:
        ConfigurationError: A contender that was asked for is not there.
    """
    chosen = Chosen()
    if wanted is not None:
        chosen.in_process = [n for n in (GLOO, PACELINE) if n == GLOO or n in wanted]
    for name in (*MPIS, DEEPSPEED):
        if wanted is None or name in wanted:
            _add(chosen, name)
    if wanted is not None and chosen.missing:
        name, reason = next(iter(chosen.missing.items()))
        raise ConfigurationError(f"--contenders {name}: {reason}")
    return chosen


def _add(chosen: Chosen, name: str) -> None:
    if name == DEEPSPEED:
        reason = _why_no_deepspeed()
        if reason:
            chosen.missing[name] = reason
        else:
            chosen.in_process.append(name)
        return
    launcher = _launcher_of(MPIS[name])
    if launcher is None:
        chosen.missing[name] = f"it does not run here; pip install {name} mpi4py"
    else:
        chosen.mpis[name] = launcher


def _why_no_deepspeed() -> str:
    """Build its shared-memory all-reduce before anybody waits for it; say why it cannot be had."""
    if importlib.util.find_spec(DEEPSPEED) is None:
        return "there is no deepspeed; pip install deepspeed"
    try:
        result = subprocess.run(
            [sys.executable, "-c", BUILD],
            env={**os.environ, "DS_ACCELERATOR": "cpu", "PATH": search_path()},
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its shared-memory all-reduce cannot be built: {error}"
    if result.returncode == 0:
        return ""
    last = result.stderr.strip().splitlines()[-1:] or ["no reason given"]
    return (
        f"its shared-memory all-reduce cannot be built (it needs a C++ compiler): {last[0][:200]}"
    )


def _launcher_of(mpi: Mpi) -> str | None:
    """Try launchers until a program under one of them says that it is this MPI."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    for name in mpi.launchers:
        launcher = shutil.which(name, path=search_path())
        if launcher is not None and _is_running(mpi, launcher):
            return launcher
    return None


def _is_running(mpi: Mpi, launcher: str) -> bool:
    words = [*mpi.command(launcher, 1), sys.executable, "-c", PROBE]
    try:
        result = subprocess.run(
            words,
            env=mpi.environ(launcher),
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return result.returncode == 0 and mpi.says in result.stdout


def _beside() -> Path:
    return Path(sys.executable).parent


def search_path() -> str:
    """Where programs are. Beside the interpreter first: that is where pip puts launchers."""
    return os.pathsep.join([str(_beside()), os.environ.get("PATH", "")])
