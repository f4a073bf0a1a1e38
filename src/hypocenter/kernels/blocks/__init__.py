"""How blocks of GGUF types are made of f32 rows: `hypo quantize`.

Door: `block_quantise.quantise_rows`. `searches_cpu.py` finds scales, and each other file of kernels
has the types of one kind. Sums run in the order of ggml's `ggml-quants.c`, each product and sum
rounded to f32, so that the bytes are those of ggml compiled without fused multiply-add.
Never reads a file.
"""
