"""Sizes, seeds and schedule of the demo model; corpus, training and export all read this one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """A Llama with tied embeddings. The defaults are those of the bundled model.

    `init_std` is the standard deviation of every matrix at the start; `min_document_chars` drops
    files too short to learn from; one document in `validation_share` is held back.
    """

    vocab_size: int = 4096
    width: int = 256
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    feed_forward: int = 768
    context_length: int = 512
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5
    init_std: float = 0.02

    batch_size: int = 16
    num_steps: int = 2308
    learning_rate: float = 3e-3
    num_warmup_steps: int = 100
    final_rate_share: float = 0.05
    weight_decay: float = 0.1

    min_document_chars: int = 300
    validation_share: int = 40
    corpus_seed: int = 0
    training_seed: int = 0
    validation_seed: int = 1

    def __post_init__(self) -> None:
        if self.width % self.num_heads or self.head_dim % 2:
            raise ValueError(
                f"width is {self.width}, but must be {self.num_heads} heads of an even size"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads}, but must divide {self.num_heads} heads"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Raises TypeError for a field that no recipe has."""
        return cls(**json.loads(text))
