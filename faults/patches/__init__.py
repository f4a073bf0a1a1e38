"""Patches of the engine as tables, and the program that runs a patched copy."""
