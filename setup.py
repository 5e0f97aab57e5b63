"""Builds the native cores of ``shm`` and ``ps``; everything else is in pyproject.toml.

Both are optional: without a C compiler, or on a system that is not Linux, the package installs
without them. Ranks of one host then reduce over their process group, and parameter servers and
their trainers do in Python what they do.
"""

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

# The free-threaded build of Python has no stable ABI yet.
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")
_COMPILE = ["-std=c11", "-O3", "-fwrapv", "-fvisibility=hidden", "-Wall", "-Wextra"]


def native(package: str) -> Extension:
    """Return the extension ``paceline.<package>._native``, of all C files in its ``native/``."""
    files = Path("src/paceline") / package / "native"
    return Extension(
        f"paceline.{package}._native",
        sources=[str(path) for path in sorted(files.glob("*.c"))],
        depends=[str(path) for path in sorted(files.glob("*.h"))],
        define_macros=[("Py_LIMITED_API", "0x030A0000")] if STABLE_ABI else [],
        py_limited_api=STABLE_ABI,
        # -fwrapv: integers overflow as torch's do. No -ffast-math: sums keep their order.
        extra_compile_args=_COMPILE,
        extra_link_args=["-pthread"],
        optional=True,
    )


setup(
    ext_modules=[native("shm"), native("ps")] if sys.platform == "linux" else [],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE_ABI else {},
)
