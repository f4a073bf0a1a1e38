"""What the rung of replays makes of a finding: its class, masks to try, what stood as zeros.

Door: `replay_causes.classify`. These files never replay anything: the rung does.
"""
