"""Stalls: noticed by each rank's watchdog, told in one report that names the culprit.

[Note: stalls]
Ranks of a job share nothing but the run folder here; they may be on hosts that cannot see each
other's processes, and any of them may be stopped, dead, or inside of native code that holds the
GIL. So nobody waits for anybody: a rank writes files of its own, each whole or not at all, and
reads those of others, which may be old, or missing.

    file             written by                   when
    rank0.events     its rank                     always (recorder)
    rank0.watch      its rank's watchdog          once: pid, host, thread, signal (WatchInfo)
    rank0.stacks     its rank, in a signal handler of C, so also while Python cannot run
                                                  when somebody sends the signal
    rank0.account    its rank's watchdog          when 'ask' has changed (Account)
    ask              whoever wants accounts       at a stall; ``paceline doctor``
    stall-1.claim    the first to create it       at a stall: its writer makes the report
    stall-1.txt      that rank                    when the report is complete

A *stall* is a wait for other ranks that lasts longer than its budget (budget.py), or a job in which
no rank moves. Every rank's own watchdog notices its own. The first to create the claim asks all
ranks for accounts, looks at the processes of this host, takes the stacks of ranks that do not
answer, and writes the report. All others see the report's file and say its first sentence, too. A
claimer that dies or is stopped leaves a claim without a report; the claim says which process it is,
so that ranks of its host see that at once, and others after a while: the next claim is free
(stall-1.claim-2). One report for one stall: nothing more is said until this rank has ended a step,
which ends the stall.

[Note: the signal]
It is sent to one thread, the watchdog's (``tgkill``), so that no system call of the program is
interrupted: a ``sleep`` or ``read`` of its own goes on. faulthandler's handler walks the frames of
all threads in C, without the GIL. It is a real-time signal that the process had no use for, sent
only to a process that the kernel says catches it: a process without a handler would die of it.
"""
