"""What the fork server imports last: it takes all that is loaded by then from the collector.

A rank forked from it shares that memory until something writes to it. A garbage collection would
walk, and so copy, every object of torch: 0.1 s and more in each rank. No name here is of use.
"""

import gc

gc.collect()
gc.freeze()
