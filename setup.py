"""Builds the native core of the shared-memory group; everything else is in pyproject.toml.

The extension is optional: without a C compiler, or on a system that is not Linux, the package
installs without it, and ranks of one host reduce over their process group.
"""

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/paceline/shm/native")
# The free-threaded build of Python has no stable ABI yet.
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")

native = Extension(
    "paceline.shm._native",
    sources=[str(path) for path in sorted(NATIVE.glob("*.c"))],
    depends=[str(path) for path in sorted(NATIVE.glob("*.h"))],
    define_macros=[("Py_LIMITED_API", "0x030A0000")] if STABLE_ABI else [],
    py_limited_api=STABLE_ABI,
    # -fwrapv: integers overflow as torch's do. No -ffast-math: sums keep their order.
    extra_compile_args=["-std=c11", "-O3", "-fwrapv", "-fvisibility=hidden", "-Wall", "-Wextra"],
    extra_link_args=["-pthread"],
    optional=True,
)

setup(
    ext_modules=[native] if sys.platform == "linux" else [],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE_ABI else {},
)
