"""A model file in another type: which tensor gets which, importance matrices, and the new file.

Door: `quantising.quantise`. The types of each mix are in `mixes.py`.
Never computes a block: `kernels/blocks/` does.
"""
