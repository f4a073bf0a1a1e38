"""What is told of a launch beside its result: registers that nobody set, types, core dumps.

Doors: `unset.follow_unset`, `parameter_types.parameter_types`, `core_dump.write_core_dump`. Never
changes what a launch does.
"""
