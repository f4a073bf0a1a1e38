"""What the verbs of `hypo` do, a file each; none imports another.

Door: the function of a file that `cli/app.py` calls. Never reads the command line itself.
"""
