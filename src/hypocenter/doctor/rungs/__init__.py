"""The rungs of the doctor's ladder: each a function of a case that gives claims.

Door: `doctor.LADDER` names them in the order in which they are climbed.
Never reads what another rung wrote.
"""
