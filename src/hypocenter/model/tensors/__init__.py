"""A model's weights: which tensors a layer has, how they are read, checked, packed and sharded.

Door: `weights.load_weights`. Never computes with them.
"""
