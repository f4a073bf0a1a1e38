"""Traces: what the tensors of a model held at named points, step by step, and how two of them part.

Doors: `writing.TraceFile`, `reading.read_trace`, `comparing.compare`. Never runs a model, and knows
no device.
"""
