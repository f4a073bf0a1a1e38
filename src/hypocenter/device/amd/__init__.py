"""AMD's machine code, read and executed on a CPU by an emulator: never on hardware.

Door for code: `code_object.read_code_object`, which gives kernels, descriptors and lines of source.
"""
