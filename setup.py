"""Builds the native cores of ``shm`` and ``ps``; everything else is in pyproject.toml.

Both are optional: without a C compiler, or on a system that is not Linux, the package installs
without them. Ranks of one host then reduce over their process group, and parameter servers and
their trainers do in Python what they do.
"""

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

# The free-threaded build of Python has no stable ABI yet. That of 3.10 has buffers, which ``ps``
# uses, but promises them since 3.11 only: one build for all is made with the headers of 3.11.
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED") and sys.version_info >= (3, 11)
_COMPILE = ["-std=c11", "-O3", "-fwrapv", "-fvisibility=hidden", "-Wall", "-Wextra"]


def native(package: str, promised: str) -> Extension:
    """Return the extension ``paceline.<package>._native``, of all C files in its ``native/``.

    Args:
        package: Below ``paceline``.
        promised: The Python whose stable ABI has all it uses, as a macro.
    """
    files = Path("src/paceline") / package / "native"
    return Extension(
        f"paceline.{package}._native",
        sources=[str(path) for path in sorted(files.glob("*.c"))],
        depends=[str(path) for path in sorted(files.glob("*.h"))],
        define_macros=[("Py_LIMITED_API", promised)] if STABLE_ABI else [],
        py_limited_api=STABLE_ABI,
        # -fwrapv: integers overflow as torch's do. No -ffast-math: sums keep their order.
        extra_compile_args=_COMPILE,
        extra_link_args=["-pthread"],
        optional=True,
    )


setup(
    ext_modules=[native("shm", "0x030A0000"), native("ps", "0x030B0000")]
    if sys.platform == "linux"
    else [],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE_ABI else {},
)
