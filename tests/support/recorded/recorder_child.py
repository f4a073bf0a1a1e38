"""Loads a model once, and for each line of stdin forks a process that records and decodes for ever.

Prints "PID FOLDER" for each, once it decodes.
"""

from __future__ import annotations

import os
import sys

from faults.model import model_path
from hypocenter import LLM
from hypocenter.record import recorder
from hypocenter.settings.config import EngineConfig, SamplingParams

llm = LLM(model_path(), EngineConfig(context_length=64, max_batch_tokens=8, num_threads=1))
recorder.close_recorder()
# As a server's: prompts of several lengths, greedy and drawn, together.
PROMPTS = [[5, 6, 7], [9], [400, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


def decode() -> None:
    # It was forked between two steps, and has one thread: so the model works here as it did there.
    llm.engine._process = os.getpid()
    opened = recorder.open_recorder()
    assert isinstance(opened, recorder.Recorder)
    was_told = False
    while True:
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=20, temperature=temperature, ignore_eos=True)
            llm.generate(PROMPTS, params)
            if not was_told:
                print(os.getpid(), opened.folder, flush=True)
                was_told = True


for _ in sys.stdin:
    if (child := os.fork()) == 0:
        decode()
    os.waitpid(child, 0)
    print("dead", flush=True)
