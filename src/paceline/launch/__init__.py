"""Processes that end with whoever started them; the one place that starts and watches them.

``ForkServer`` is a process with torch imported that forks children on request, ``Child`` the handle
of one of them. Used by ``paceline run``, ``testing.run_ranks`` and ``ps.local``. Who decides when
to start and what a failure means is above; nothing here knows ranks' collectives or DDP.
"""
