"""Notes which elements of which tensors a failed assertion of the program compared.

Door: `watch.Comparisons`, which `foreign/hooks.py` starts and tells of the program's end. Never
runs an expression of the program again, and judges nothing.
"""
