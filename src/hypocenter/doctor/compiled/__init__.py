"""Kernels that torch.compile made, in the words of the program: its line, operation and tensor.

Door: `words.py` says what the program calls a parameter, and tells a proven cause in its words;
`asserted.py` reads which index an assertion of such a kernel checks. Never proves anything.
"""
