"""From a bundle to a cause, with its proof.

Door: `doctor.diagnose`, and `report.py` for what a person reads. `case.py` joins what a bundle
holds, each rung in `rungs/` looks for causes of a kind, `diff.py` holds two runs side by side.
Never needs a GPU, and never guesses without saying so.
"""
