"""What the bodies of requests ask for: how answers are sampled, what a chat's answer may be.

Doors: `orders.read_chat`, `orders.read_completion`. The bodies themselves are in
`server/fields.py`. Never asks a worker.
"""
