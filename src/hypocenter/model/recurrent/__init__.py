"""Layers that carry a state instead of reading earlier tokens: facts, weights, buffers and ops.

Doors: `recurrence.read_recurrence`, `delta_weights.load_delta`, `delta_net.DeltaNet`.
Never knows which request a state belongs to.
"""
