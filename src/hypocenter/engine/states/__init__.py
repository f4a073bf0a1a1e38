"""States that layers carry from token to token: which slot is whose, and what stands in it.

Doors: `slots.StateSlots`, which gives slots out, and `ledger.StateLedger`, which knows what was
done with them. Never looks into a state.
"""
