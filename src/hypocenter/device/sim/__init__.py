"""A simulated GPU: Triton kernels on the CPU, against a memory model of the named GPU.

Door: `sim.open_sim`. Accesses fault, neighbours are read and streams run in a seeded order, as
`memory.py` and `queue.py` say.
Never touches a driver.
"""
