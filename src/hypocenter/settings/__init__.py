"""What a person may set: defaults, limits and words of the engine, the sampler and this machine.

Doors: `config.EngineConfig`, `config.SamplingParams`, `environment`. Never opens a model.
"""
