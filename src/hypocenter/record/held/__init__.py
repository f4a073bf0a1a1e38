"""What tensors held around launches, and the files that keep it: of a traced run, of a bundle.

Doors: `trace_log.read_trace`, `bundle_arrays.py`. Never knows a device, and judges nothing.
"""
