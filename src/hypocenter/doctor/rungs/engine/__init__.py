"""The rungs that know what hypocenter's own engine means to do in a step.

Door: `doctor.LADDER`. They never look at programs that are not hypocenter's.
"""
