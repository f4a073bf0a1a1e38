"""The order of a torch program's work: what its streams, events and host ask for, and use.

Door: `session.OrderSession`, which has torch tell `watch.StreamWatch` of its operations, events and
waits. What is ordered and what is not is for `order/` to say. Never changes
what the program does, and loads no torch that the program has not loaded.
"""
