"""A user's own Triton kernels held against references that stand beside them.

Doors: `file.verify_file`, and `pytest_plugin.py` for tests. Never compares bits with a GPU's: all
launches run on the CPU.
"""
