"""The lab's victims, one file each; `lab/victim.py` finds them by themselves."""
