"""Ops by which GPUs that hold a model together exchange what each has made.

Doors: `collectives.all_reduce`, `all_gather`, `broadcast` and `join`. Never waits for another
process where `group.close` would not end the wait: what waits is the library of the group
(`device/group.py`) or, between two GPUs that reach each other's memory, `peer_sum.PeerSum`.
"""
