"""The native core: one extension in C, for the group, the wrapper and the parameter servers.

``group/`` has the collectives in shared memory, ``wrapper/`` the hooks that autograd calls for
every gradient, ``ps/`` what trainers and servers do with rows; ``module.c`` puts them together.
Everything works without it, more slowly: see :mod:`paceline.native.extension`.
"""
