"""Memory and descriptors that processes of one user share: sealed memfds, mappings, hand-over.

Below :mod:`paceline.shm`, :mod:`paceline.ps` and :mod:`paceline.launch`, which use it. Must not
know what lies in it.
"""
