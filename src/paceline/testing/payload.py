"""Functions, arguments and results as bytes, on their way between a caller and its own ranks.

Used on both ends by ``run_ranks``. The bytes never leave the machine or the user: they travel over
an unnamed pipe, or in a file that only the user can reach.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import Any

from paceline.errors import ConfigurationError


def pack(value: Any, what: str) -> bytes:
    """Pickle ``value``; what plain pickle cannot do is left to cloudpickle, if it is installed.

    Args:
        value: Anything.
        what: The noun for it in the error, for example ``"fn and its arguments"``.

    Raises:
        ConfigurationError: Neither can.
    """
    try:
        # Not the pickler of multiprocessing: it would move tensors into shared memory, and the rank
        # that holds them is about to exit.
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        return _pack_by_value(value, what, error)


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle a function and its arguments, for :func:`unpack_call` in another process."""
    if getattr(fn, "__module__", None) == "__main__":
        # By reference it may not exist over there: a rank runs the main script under another name,
        # without what stands below `if __name__ == "__main__":`.
        with contextlib.suppress(ConfigurationError):
            return _pack_by_value((fn, args), "fn", None)
    return pack((fn, args), "fn and its arguments")


def unpack(data: bytes) -> Any:
    """Undo :func:`pack`."""
    return pickle.loads(data)


def unpack_call(data: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Undo :func:`pack_call`.

    Raises:
        ConfigurationError: What the function needs cannot be imported here.
    """
    try:
        fn, args = pickle.loads(data)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"this rank cannot import the function or its arguments ({error}). Define them at the "
            "top level of a module on sys.path, or as local functions with cloudpickle installed."
        ) from error
    return fn, args


def _pack_by_value(value: Any, what: str, plain_error: Exception | None) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        raise ConfigurationError(
            f"{what} cannot be pickled ({plain_error}). Lambdas and local functions need "
            "cloudpickle: pip install cloudpickle. Without it, define the function at the top "
            "level of an importable module."
        ) from plain_error
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise ConfigurationError(
            f"{what} cannot be pickled, not even by cloudpickle ({error}). Pass plain data, and "
            "make groups, locks, files and modules with hooks inside the function."
        ) from error
