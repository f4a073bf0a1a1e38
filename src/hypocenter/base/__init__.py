"""What every room speaks of: errors, tensors, element types, results, where our files lie.

Doors: its files, one noun each. Never imports another room.
"""
