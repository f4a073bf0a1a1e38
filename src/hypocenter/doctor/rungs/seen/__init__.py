"""Rungs on what was seen to happen, by a card or by the recorder.

Doors: `card_hardware.card_hardware` and `unwritten_reads.unwritten_reads`. Never replays a launch.
"""
