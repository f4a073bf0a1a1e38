"""What layers of all families are made of: products, norms, attention with its heads.

Doors: `layer_ops.LayerOps`, `attending.Attending`, `heads.Heads`. Never knows which layer it is in.
"""
