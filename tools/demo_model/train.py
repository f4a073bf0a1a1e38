"""Trains the demo model's tokenizer and weights on the CPU; writes JSON and safetensors.

The only file of the project's tools that imports torch. Rotary pairs are halves of a head here
(`x[i]`, `x[i + head_dim/2]`); export.py reorders them for GGUF.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import cyclopts
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

from tools.demo_model.recipe import Recipe

#: Splits text before byte-pair encoding; the pattern that GGUF calls "llama-bpe".
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: In order of their ids: 0 begins a document, 1 ends it.
SPECIAL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>")


class Block(nn.Module):
    """One decoder layer: attention with grouped keys, then SwiGLU, both after an RMS norm."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        width, kv_width = recipe.width, recipe.num_kv_heads * recipe.head_dim
        self.attn_norm = nn.Parameter(torch.ones(width))
        self.attn_q = nn.Linear(width, width, bias=False)
        self.attn_k = nn.Linear(width, kv_width, bias=False)
        self.attn_v = nn.Linear(width, kv_width, bias=False)
        self.attn_output = nn.Linear(width, width, bias=False)
        self.ffn_norm = nn.Parameter(torch.ones(width))
        self.ffn_gate = nn.Linear(width, recipe.feed_forward, bias=False)
        self.ffn_up = nn.Linear(width, recipe.feed_forward, bias=False)
        self.ffn_down = nn.Linear(recipe.feed_forward, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [batch, num_tokens, width]; cos, sin: [num_tokens, head_dim / 2]."""
        x = x + self.attention(rms_norm(x, self.attn_norm, self.recipe), cos, sin)
        hidden = rms_norm(x, self.ffn_norm, self.recipe)
        gated = functional.silu(self.ffn_gate(hidden)) * self.ffn_up(hidden)
        down: Tensor = self.ffn_down(gated)
        return x + down

    def attention(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, num_tokens, _ = hidden.shape

        def heads(flat: Tensor) -> Tensor:  # -> [batch, num_heads, num_tokens, head_dim]
            return flat.view(batch, num_tokens, -1, self.recipe.head_dim).transpose(1, 2)

        query = rotate(heads(self.attn_q(hidden)), cos, sin)
        key = rotate(heads(self.attn_k(hidden)), cos, sin)
        value = heads(self.attn_v(hidden))
        group = self.recipe.num_heads // self.recipe.num_kv_heads
        mixed = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(group, 1),
            value.repeat_interleave(group, 1),
            is_causal=True,
        )
        output: Tensor = self.attn_output(mixed.transpose(1, 2).reshape(batch, num_tokens, -1))
        return output


class Llama(nn.Module):
    """Token ids [batch, num_tokens] to logits [batch, num_tokens, vocab_size]; tied embeddings."""

    cos: Tensor
    sin: Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.token_embd = nn.Embedding(recipe.vocab_size, recipe.width)
        self.blk = nn.ModuleList(Block(recipe) for _ in range(recipe.num_layers))
        self.output_norm = nn.Parameter(torch.ones(recipe.width))
        exponents = torch.arange(0, recipe.head_dim, 2).float() / recipe.head_dim
        angles = torch.arange(recipe.context_length).float()[:, None] / recipe.rope_base**exponents
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=recipe.init_std)

    def forward(self, token_ids: Tensor) -> Tensor:
        num_tokens = token_ids.shape[1]
        x = self.token_embd(token_ids)
        for block in self.blk:
            x = block(x, self.cos[:num_tokens], self.sin[:num_tokens])
        return functional.linear(rms_norm(x, self.output_norm, self.recipe), self.token_embd.weight)


def rms_norm(x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    return functional.rms_norm(x, (recipe.width,), weight, recipe.norm_epsilon)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def train_tokenizer(texts: list[str], recipe: Recipe) -> Tokenizer:
    """Byte-level byte-pair encoding; needs `vocab_size` of at least 256 bytes + specials."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != recipe.vocab_size:
        raise ValueError(
            f"the corpus gave {tokenizer.get_vocab_size()} tokens, but the recipe has "
            f"{recipe.vocab_size}; give more text or a smaller vocab_size"
        )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All documents in one row of ids, each between its begin and end token."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids += [0, *encoding.ids, 1]
    return torch.tensor(ids, dtype=torch.long)


def draw(ids: Tensor, num_rows: int, recipe: Recipe, generator: torch.Generator) -> Tensor:
    """Random stretches of the corpus, [num_rows, context_length + 1]."""
    length = recipe.context_length + 1
    if len(ids) <= length:
        raise ValueError(f"{len(ids)} tokens of text, but a row needs more than {length}")
    starts = torch.randint(len(ids) - length, (num_rows,), generator=generator)
    return torch.stack([ids[start : start + length] for start in starts.tolist()])


def loss_of(model: Llama, rows: Tensor) -> Tensor:
    logits = model(rows[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def validate(model: Llama, ids: Tensor, num_batches: int = 8) -> float:
    """Mean loss per token, in nats, over the same stretches each time."""
    generator = torch.Generator().manual_seed(model.recipe.validation_seed)
    with torch.no_grad():
        losses = [
            loss_of(model, draw(ids, 8, model.recipe, generator)).item() for _ in range(num_batches)
        ]
    return sum(losses) / num_batches


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up times a cosine that ends at `final_rate_share` of the full rate."""
    warmup = min(1.0, (step + 1) / recipe.num_warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * step / recipe.num_steps))
    share = cosine * (1 - recipe.final_rate_share) + recipe.final_rate_share
    return recipe.learning_rate * warmup * share


def train(model: Llama, ids: Tensor, validation_ids: Tensor, *, report_every: int = 20) -> None:
    """Run the recipe's steps with AdamW and bfloat16 autocast, printing the loss on the way."""
    recipe = model.recipe
    matrices = [p for p in model.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() == 1]
    optimiser = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    generator = torch.Generator().manual_seed(recipe.training_seed)
    began = time.monotonic()
    for step in range(recipe.num_steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, recipe)
        rows = draw(ids, recipe.batch_size, recipe, generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, rows)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if (step + 1) % report_every == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s")
        if (step + 1) % (25 * report_every) == 0:
            print(f"step {step + 1}: validation loss {validate(model, validation_ids):.3f}")


def build(corpus: dict[str, list[str]], recipe: Recipe, folder: Path) -> Llama:
    """Train tokenizer and model; writes `tokenizer.json` and `model.safetensors` to `folder`.

    The recipe travels in the safetensors header, so that the export cannot use another one.
    """
    torch.manual_seed(recipe.training_seed)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(corpus["train"], recipe)
    tokenizer.save(str(folder / "tokenizer.json"))
    model = Llama(recipe)
    train(model, encode(tokenizer, corpus["train"]), encode(tokenizer, corpus["validation"]))
    save_file(model.state_dict(), folder / "model.safetensors", {"recipe": recipe.to_json()})
    return model


def main(
    corpus: Path = Path("corpus.json"),
    folder: Path = Path("demo"),
    *,
    num_steps: int = Recipe().num_steps,
    num_threads: int = 2,
) -> None:
    """Train the demo model from the file that corpus.py wrote.

    Parameters
    ----------
    corpus
        JSON with the texts.
    folder
        Where tokenizer.json and model.safetensors go.
    num_steps
        Steps to train.
    num_threads
        Threads that torch may use.
    """
    torch.set_num_threads(num_threads)
    build(json.loads(corpus.read_text("utf-8")), Recipe(num_steps=num_steps), folder)


if __name__ == "__main__":
    cyclopts.run(main)
