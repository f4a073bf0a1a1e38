"""What a process writes down about itself, and how that is read again.

Doors: `recorder.current()`, which does nothing where nothing is recorded, and `bundle.load`. The
events are in `events.py`; they lie in a ring (`ring.py`) that survives the process, or in a bundle.
Knows no device: what it needs of a launch or a plan it declares (`Launchable`, `Planned`).
Never breaks the run that it records, and never judges it.
"""
