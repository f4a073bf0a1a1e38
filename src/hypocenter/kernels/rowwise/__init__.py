"""Ops that work on each row by itself: norms, activations, lookups of embeddings.

Doors: `norm.rms_norm`, `layer_norm.layer_norm`, `activation.gate`, `embedding.lookup`.
Never reads another row.
"""
