"""The words of a command line: ours, those of llama.cpp and vLLM, and those of a settings file.

Door: `reading.in_our_words`, and `settings.fill`, which cyclopts calls. Never runs a verb. The
tables beside it say what each option of the other programs does here.
"""
