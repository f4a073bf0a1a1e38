"""What hypocenter's own engine tells of its requests, blocks and draws.

Door: `record.events.AnyEvent`.
"""
