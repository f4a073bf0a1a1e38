"""Sees the first operation that makes NaN or infinity of finite numbers, in a run with `--nan`.

Door: `watch.NumberWatch`, which `foreign/hooks.py` starts. Counts on the device itself and looks at
a few hundred operations at once. Never changes a number of the program's, but in memory that
nobody has written. Judges nothing.
"""
