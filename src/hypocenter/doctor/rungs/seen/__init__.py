"""Rungs on what was seen to happen, by a card or by the recorder.

Doors: `card_hardware.card_hardware`, `failed_comparison.failed_comparison`,
`stale_addresses.stale_addresses`, `tuned_in_place.tuned_in_place` and
`unwritten_reads.unwritten_reads`. Never runs a program again; some replay a launch.
"""
