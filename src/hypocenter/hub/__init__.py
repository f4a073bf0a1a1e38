"""From the name of a model to its file: what a hub has, what is here already, and the way between.

Door: `find.find_model`. Files lie in Hugging Face's own cache, so that every tool shares them.
It never looks into a file, and nothing but `download.py` asks the network.
"""
