"""Builds the native core; everything else is in pyproject.toml.

It is optional: without a C compiler, or on a system that is not Linux, the package installs without
it. Ranks of one host then reduce over their process group, and parameter servers and their trainers
do in Python what they do.
"""

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

# The free-threaded build of Python has no stable ABI yet. That of 3.10 has buffers, but promises
# them since 3.11 only: one build for all is made with the headers of 3.11.
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED") and sys.version_info >= (3, 11)
NATIVE = Path("src/paceline/native")

native = Extension(
    "paceline.native._native",
    sources=[str(path) for path in sorted(NATIVE.rglob("*.c"))],
    depends=[str(path) for path in sorted(NATIVE.rglob("*.h"))],
    include_dirs=[str(NATIVE), *(str(path) for path in sorted(NATIVE.iterdir()) if path.is_dir())],
    define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE_ABI else [],
    py_limited_api=STABLE_ABI,
    # -fwrapv: integers overflow as torch's do. -fno-math-errno: roots are one instruction. No
    # -ffast-math: sums keep their order.
    extra_compile_args=[
        "-std=c11",
        "-O3",
        "-fwrapv",
        "-fno-math-errno",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
    ],
    extra_link_args=["-pthread", "-lm"],
    optional=True,
)

setup(
    ext_modules=[native] if sys.platform == "linux" else [],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE_ABI else {},
)
