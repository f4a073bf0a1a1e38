"""What the bodies of requests ask for: how answers are sampled, what a chat's answer may be.

Doors: `sampling_fields.chat_params`, `chat_fields.read_chat`. The bodies themselves are in
`server/fields.py`. Never asks a worker.
"""
