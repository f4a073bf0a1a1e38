"""Every way in which kernels are launched, found by plans on a device that runs nothing.

Door: `specimens.project_specimens`.
Never holds a number of a model's: its weights take no room.
"""
