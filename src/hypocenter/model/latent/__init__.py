"""Attention whose keys and values lie compressed, in a latent for all heads: facts, weights, ops.

Doors: `latent.read_latent`, `latent_weights.load_latent`, `latent_attention.LatentAttention`.
Never computes attention itself.
"""
