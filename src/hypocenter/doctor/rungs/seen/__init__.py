"""Rungs on what was seen to happen, by a card or by the recorder.

Doors: `card_hardware.card_hardware`, `stale_addresses.stale_addresses` and
`unwritten_reads.unwritten_reads`. Only the second replays a launch. Never runs a program again.
"""
