"""Tasks of lm-eval, run by its own library on an engine of this process: `hypo eval`.

Door: `evaluating.evaluate`. Never scores by itself, and prints nothing.
"""
