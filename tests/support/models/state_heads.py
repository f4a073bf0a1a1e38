"""Random models whose layers carry a state, of which one nearly always says the next letter, as a
head that drafts behind them does three times of four; runs nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.families import FamilyModel
from models.family_table import FAMILIES, VOCAB_SIZE
from models.gguf_edit import Tensors, rewritten

#: The first tokens of the vocabulary, which follow one another in a circle.
NUM_LETTERS = 40


def end_with_attention(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have a family of delta rules have three layers, the last two with attention."""
    family = FAMILIES[name]
    kinds = ["linear_attention", "full_attention", "full_attention"]
    config = {**family.config, "num_hidden_layers": len(kinds), "layer_types": kinds}
    keys = {key: x for key, x in family.metadata.items() if key != "full_attention_interval"}
    keys["attention.recurrent_layers"] = [kind == "linear_attention" for kind in kinds]
    monkeypatch.setitem(FAMILIES, name, replace(family, config=config, metadata=keys))


def as_alphabet(made: FamilyModel, folder: Path, *, has_head: bool) -> Path:
    """The model with tokens and an output that make it say the next letter; with `has_head` its
    last layer is a head that drafts, and says another behind each fourth letter."""
    config = made.hf_model.config
    width, last = config.hidden_size, config.num_hidden_layers - 1
    letters, ones = np.arange(NUM_LETTERS), np.ones(width, np.float32)
    table, output, of_head = (np.zeros((VOCAB_SIZE, width), np.float32) for _ in range(3))
    table[letters, letters] = 50
    output[(letters + 1) % NUM_LETTERS, letters] = 0.9
    of_head[(letters + np.where(letters % 4, 1, 2)) % NUM_LETTERS, letters] = 0.9
    projection = np.zeros((width, 2 * width), np.float32)
    projection[:, :width] = 20 * np.eye(width)
    of_last = {
        "eh_proj": projection, "enorm": ones, "hnorm": ones, "shared_head_norm": ones,
        "shared_head_head": of_head,
    }  # fmt: skip

    def change(tensors: Tensors) -> Tensors:
        ends = {"token_embd.weight": table, "output.weight": output, "output_norm.weight": ones}
        own = {f"blk.{last}.nextn.{name}.weight": x for name, x in of_last.items()}
        return tensors | ends | (own if has_head else {})

    keys = {f"{made.family.arch}.nextn_predict_layers": 1} if has_head else {}
    return rewritten(made.path, folder / f"{made.name}-alphabet.gguf", change, keys)
