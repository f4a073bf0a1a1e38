"""AMD's machine code: own kernels compiled to it, and what its opcodes compute."""
