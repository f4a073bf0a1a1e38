"""What AMD's opcodes compute: their meanings as text, the arithmetic that these call, and their
machine code. Door: `handlers.address_of`. Never knows registers or memory.
"""
