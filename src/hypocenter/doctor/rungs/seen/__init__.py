"""Rungs on what was seen to happen, by a card or by the recorder.

Never replays a launch.
"""
