"""`hypo serve` on the machines of a Ray cluster: a Ray Serve application of replicas.

Door: `application.application`, which `serve run` is given. It never runs a model in a process of
Ray's: each replica starts a server of its own, and what comes is passed on.
"""
