"""Mixtures of experts: which experts a token takes, and products that read each used one once.

Doors: `routing.route`, `grouping.group`, `experts.experts_linear`, `experts.experts_gate_codes`,
`mixing.mix`. `experts_table.py` has the buffers that they share.
Never adds what experts give in another order than that of a token's choice.
"""
