"""Layers that carry a state instead of reading earlier tokens: facts, weights, buffers and ops.

Doors: `recurrence.read_recurrence`, `mixer_weights.load_mixer`, `state_net.allocate_net`.
Never knows which request a state belongs to.
"""
