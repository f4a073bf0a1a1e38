"""Kernels of Triton that tests compile, guard and replay."""
