"""The words of a command line: ours, those of llama.cpp and vLLM, and those of a settings file.

Enter by `reading.in_our_words` and `settings.fill`. They never run a verb. The tables beside it
say what each option of the other programs does here.
"""
