"""Products of activations with weights of every type.

Doors: `linear.linear`, `linear_gate.linear_gate_codes`. `operands.py` has the buffers for
activations as products read them, `quantise.py` fills them.
Never changes the order in which an output is summed.
"""
