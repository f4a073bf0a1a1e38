"""What hypocenter's own engine tells of its requests, blocks and draws.

Door: `record.events.AnyEvent`. Never knows a device, and never what the doctor makes of it.
"""
