"""Runs a Triton kernel on the CPU, program by program, over a memory of the caller's.

Door: `interpret.Interpretation`. `builder.py` mends the traps of Triton's own interpreter.
Never decides what an access may do: the memory does.
"""
