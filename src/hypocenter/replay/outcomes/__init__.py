"""Launches of which all is known that they were given and gave: compared, and made anew on a GPU.

Doors: `compare.replay_outcome`, `device_runs.run_forms`. Never judges: the doctor does.
"""
