"""The lab's victims, one file each; `victim.py` finds them by themselves."""
