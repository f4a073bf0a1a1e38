"""Rungs on what was seen to happen, by a card or by the recorder: nothing is replayed here."""
