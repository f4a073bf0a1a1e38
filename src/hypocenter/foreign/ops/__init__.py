"""Sees torch's operations in machine code, where Python for each of them would be the bound.

Door: `native.NativeOps`. `observer.cpp` is compiled once by the C++ compiler that is there, and
kept in the cache. Where that cannot be, modes in Python see the same. Never says what is a fault.
"""
