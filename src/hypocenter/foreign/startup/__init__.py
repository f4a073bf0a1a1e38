"""The folder that leads a foreign program's PYTHONPATH: one file, and nothing else ever."""
