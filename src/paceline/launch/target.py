"""What ``paceline run`` is asked to run, and what it looks like from inside of a rank.

Made by ``cli/run.py``, carried out in each rank by ``script.py``.
"""

from __future__ import annotations

import difflib
import enum
import importlib.machinery
import importlib.util
import os
import shutil
from dataclasses import dataclass

from paceline.errors import ConfigurationError


class TargetKind(enum.Enum):
    """How the target is named on the command line."""

    SCRIPT = "script"  # a file
    MODULE = "module"  # -m
    COMMAND = "command"  # --no-python


@dataclass(frozen=True)
class Target:
    """A script, module or program, with its arguments."""

    kind: TargetKind
    name: str
    args: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """As one would type it."""
        dash_m = ("-m",) if self.kind is TargetKind.MODULE else ()
        return (*dash_m, self.name, *self.args)

    def check(self) -> None:
        """See that it is there before anything is started.

        Raises:
            ConfigurationError: It is not.
        """
        if self.kind is TargetKind.COMMAND:
            if shutil.which(self.name) is None:
                raise ConfigurationError(f"there is no program {self.name}")
        elif self.kind is TargetKind.SCRIPT:
            self._check_script()

    def _check_script(self) -> None:
        if os.path.isdir(self.name):
            raise ConfigurationError(f"{self.name} is a directory: name a script, or use -m")
        if not os.path.exists(self.name):
            is_module = not self.name.endswith(".py") and _is_module(self.name)
            hint = f"; for the module, write: -m {self.name}" if is_module else _alike(self.name)
            raise ConfigurationError(f"there is no script {self.name} in {os.getcwd()}{hint}")
        if not os.access(self.name, os.R_OK):
            raise ConfigurationError(f"the script {self.name} cannot be read")


def _alike(name: str) -> str:
    """A script that was meant, perhaps."""
    where, wanted = os.path.split(name)
    try:
        scripts = [each for each in os.listdir(where or ".") if each.endswith(".py")]
    except OSError:
        return ""
    found = difflib.get_close_matches(wanted, scripts, n=1)
    return f"; did you mean {os.path.join(where, found[0])}?" if found else ""


def _is_module(name: str) -> bool:
    """Look without importing a parent package."""
    top = name.partition(".")[0]
    try:
        return importlib.machinery.PathFinder.find_spec(top, [os.getcwd()]) is not None
    except (ImportError, ValueError):
        return False
