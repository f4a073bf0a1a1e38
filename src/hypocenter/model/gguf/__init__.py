"""GGUF files: read within bounds, mapped and never copied.

Door: `file.open_gguf`; `inspection.py` says what a file holds.
Never trusts a number of the file: each count has a bound.
"""
