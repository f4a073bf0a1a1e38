"""Parts of one model, each on a GPU of its own.

Doors: `part.Part`, `split.part_of` and `part_of_file.PartOfFile`. Never knows how parts exchange
what they make.
"""
