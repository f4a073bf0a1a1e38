"""What the rung of replays makes of a finding: its class, masks to try, what stood as zeros.

Doors: `replay_causes.classify`, `trials.fitting`. These files never replay anything: the rung does.
"""
