"""What processes of one server say to each other: messages, and the frames they travel in.

Doors: `messages`, `frames`. Never knows a socket, a request's route or an engine.
"""
