"""Which tokens may come next, so that one step can try several of them.

Doors: `tried.with_drafts`, and `draft_model.DraftModel` where another model says so. Never chooses
a token: the sampler does, of the same logits and with the same random numbers as without drafts.
"""
