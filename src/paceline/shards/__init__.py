"""Logical shards: the same bits at any number of ranks (``docs/same-bits.md``).

What a rank adds up, in which order, and from which random stream it draws. The loop that users
write is run by :mod:`paceline.ddp.features.shard_rounds`. Must not know wrappers or reducers.
"""
