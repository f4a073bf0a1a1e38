"""A model: what its file says, its weights, and the one decoder that runs every family.

Doors: `gguf/file.open_gguf`, `weights.Weights`, `decoder.Decoder`; `text/` has tokenizers and chat
templates.
Never touches numpy or torch in the decoder, and never executes what a file holds.
"""
