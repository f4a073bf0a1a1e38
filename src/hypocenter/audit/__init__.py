"""What an engine does with a model, audited: `hypo audit`.

Door: `audit.audit`. A gate compares two ways of running the same requests, and is proven by what
the engine recorded of both, never by what was asked for. Prints nothing.
"""
