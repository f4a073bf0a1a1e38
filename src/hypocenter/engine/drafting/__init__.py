"""Which tokens may come next, so that one step can try several of them.

Door: `drafter.Drafter`. Never chooses a token: the sampler does, of the same logits and with the
same random numbers as without drafts.
"""
