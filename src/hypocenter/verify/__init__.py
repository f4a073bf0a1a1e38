"""Whether a machine computes a model rightly: `hypo verify`.

Door: `verify.verify`. Each stage holds a planted error against what looks for errors, and says
what it has looked at and what not. Never writes to a model's file, and prints nothing.
"""
