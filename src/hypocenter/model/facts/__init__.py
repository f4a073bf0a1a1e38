"""What a model is: its family, its sizes, its layers and how ranks share them.

Door: `architecture.read_architecture`. Never reads a weight.
"""
