"""What torch.compile's kernels were made of: the graph of the program's operations, with its lines.

Door: `session.py`, which `foreign/hooks.py` tells of modules, launches and the end. Torch's own
provenance is read: the lines that its compiler notes for each operation, and the notes that
Inductor writes beside each kernel. Never changes what is compiled.
"""
