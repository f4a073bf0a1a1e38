"""Ops by which GPUs that hold a model together exchange what each has made.

Doors: `collectives.all_reduce`, `all_gather`, `broadcast` and `join`. Never waits for another
process by itself: the library of the group does (`device/group.py`), or a launch of
`peer_sum.PeerSum` on two GPUs that reach each other's memory. `group.close` ends both waits.
"""
