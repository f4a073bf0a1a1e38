"""What the GPU's sampling kernels demand; imports no Triton, so that any machine can recheck it."""

from __future__ import annotations

from hypocenter.base.tensor import DType
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Arg, Index, Rule

#: Tokens of one program.
BLOCK = 1024
#: Words of a row's state; `sampling_gpu.py` names them.
NUM_STATES = 9

_LOGITS = (
    Arg("logits", (DType.F32,), "num_rows, vocab_size"),
    Arg("parts", (DType.I64,), "num_rows, num_blocks, 2", "both"),
    Arg("outcomes", (DType.I32,), "num_rows, 2", "write"),
    Arg("next_ids", (DType.I32,), "num_rows", "write"),
    Rule("0 < vocab_size <= 1 << 21", "a vocabulary has 1 to 2097152 tokens"),
    Rule(f"num_blocks == -(-vocab_size // {BLOCK})", f"a block is {BLOCK} tokens"),
)
_MASKS = (
    Arg("masks", (DType.I32,), "num_rows, num_words"),
    Rule("num_words == -(-vocab_size // 32)", "a word of a mask is 32 tokens"),
)
_FILTERS = (
    Arg("keys", (DType.I64,), "num_rows, vocab_size", "both"),
    Arg("settings", (DType.I64,), "num_rows, 8"),
    Arg("states", (DType.I64,), f"num_rows, {NUM_STATES}", "both"),
    Arg("counts", (DType.I32,), "num_rows, num_blocks, 16", "both"),
    Arg("masses", (DType.I64,), "num_rows, num_blocks, 16", "both"),
    Arg("context_ids", (DType.I32,), "num_context", index=Index("vocab_size", "the vocabulary")),
    Arg("output_counts", (DType.I32,), "num_context"),
    Arg(
        "context_starts",
        (DType.I32,),
        "num_rows + 1",
        index=Index("num_context + 1", "the context", monotone=True),
    ),
)
#: Of the one launch that adds biases to keys; steps without them have neither.
BIAS = Contract(
    "sample_bias",
    Arg("keys", (DType.I64,), "num_rows, vocab_size", "both"),
    Arg("bias_ids", (DType.I32,), "num_biases", index=Index("vocab_size", "the vocabulary")),
    Arg("biases", (DType.I64,), "num_biases"),
    Arg(
        "bias_starts",
        (DType.I32,),
        "num_rows + 1",
        index=Index("num_biases + 1", "the biases", monotone=True),
    ),
)
GREEDY = Contract("greedy", *_LOGITS)
GREEDY_MASKED = Contract("greedy", *_LOGITS, *_MASKS)
CONTRACT = Contract("sample", *_LOGITS, *_FILTERS)
CONTRACT_MASKED = Contract("sample", *_LOGITS, *_MASKS, *_FILTERS)
