"""Ops of layers that carry a state from token to token instead of reading all earlier ones.

Doors: `short_conv.short_conv`, `delta_rule.delta_rule`, `ssm_scan.ssm_scan`; `sequences.py` says
how all find the tokens and the states of a step's sequences.
Never takes several tokens of a sequence at once: a result would depend on where a chunk begins.
"""
