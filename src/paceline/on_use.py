"""Names of a package that are imported when somebody uses them.

Used in the ``__init__.py`` of packages whose importers seldom need all of it. Must stay cheap.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def import_on_use(package: str, places: Mapping[str, str]) -> Callable[[str], object]:
    """Make the ``__getattr__`` of a package.

    Args:
        package: Its ``__name__``.
        places: For each name the module of the package that has it; empty if it is a module itself.
            No other name may be that of a module: importing that would put it in its place.
    """

    def find(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if places[name]:
            value: object = getattr(import_module(f"{package}.{places[name]}"), name)
        else:
            value = import_module(f"{package}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    return find
