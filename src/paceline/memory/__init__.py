"""Memory and descriptors that processes of one user share: sealed memfds, mappings, hand-over.

Below :mod:`paceline.shm` and :mod:`paceline.ps`, which both use it. Must not know what lies in it.
"""
