"""Parts of a machine by themselves: memory that is free, multiprocessors, cores under load.

Doors: `memory_stage.MemoryStage`, `multiprocessors.Probe`, `load.busy_cores`. Never loads a model.
"""
