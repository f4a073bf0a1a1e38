"""The folder that leads a foreign program's PYTHONPATH: no name in it is one that others have."""
