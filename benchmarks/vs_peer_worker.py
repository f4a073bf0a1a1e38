"""llama.cpp's side of the comparison, run by the peer's own Python; compares nothing.

Without arguments it obeys commands (vs_protocol.py); `quantise SOURCE OUT TYPE THREADS` makes a
file; `version` prints the version of llama-cpp-python. Needs `llama_cpp` and numpy only.
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any

import llama_cpp
import numpy as np
from vs_protocol import Facts, memory_facts, serve

KV_DTYPES = {"f32": 0, "f16": 1}  # ggml_type
LOG_DEBUG, LOG_ERROR = 1, 4  # ggml_log_level


class Peer:
    """One model in llama.cpp with sequence 0 of its cache."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.num_lines = 0
        # ctypes does not keep a callback alive by itself.
        self._log = llama_cpp.llama_log_callback(self._note)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))

    def load(
        self, path: str, num_threads: int, context_length: int, batch: int, kv_dtype: str,
        is_reference: bool = False,
    ) -> Facts:  # fmt: skip
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context_length, batch, batch
        params.n_threads = params.n_threads_batch = num_threads
        params.type_k = params.type_v = KV_DTYPES[kv_dtype]
        params.swa_full = False  # as its own programs choose
        if is_reference:
            params.flash_attn_type = 0  # as close to the plain formula as it gets
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context of {context_length} for {path}")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab_size = llama_cpp.llama_n_vocab(llama_cpp.llama_model_get_vocab(self.model))
        self.kv_dtype = kv_dtype
        return self.facts()

    def facts(self) -> Facts:
        """What the context and the model say of themselves, and what the log said of attention."""
        few = llama_cpp.llama_n_threads(self.context)
        many = llama_cpp.llama_n_threads_batch(self.context)
        return {
            "engine": f"llama.cpp (llama-cpp-python {llama_cpp.__version__})",
            "file_type": _file_type(llama_cpp.llama_model_ftype(self.model)),
            "num_threads": few if few == many else f"{few} and {many}",
            "context_length": llama_cpp.llama_n_ctx(self.context),
            "batch": llama_cpp.llama_n_ubatch(self.context),
            "kv_dtype": self.kv_dtype,
            "instructions": llama_cpp.llama_print_system_info().decode().strip(" |"),
            "notes": self.notes,
        }

    def prefill(self, tokens: list[int]) -> Facts:
        """One prompt into an empty cache, logits for its last token."""
        return self._run(tokens, 0, len(tokens))

    def decode(self, tokens: list[int], depth: int, num_warm: int = 0) -> Facts:
        """One token at a time behind the `depth` tokens that are in the cache already; the first
        `num_warm` of them once before, which does not count."""
        if num_warm:
            self._run(tokens[:num_warm], depth, 1)
        return self._run(tokens, depth, 1)

    def _run(self, tokens: list[int], depth: int, chunk: int) -> Facts:
        llama_cpp.llama_memory_seq_rm(self.memory, 0, depth, -1)
        before = self._num_cached()
        if before != depth:
            raise RuntimeError(f"{before} tokens are in the cache, but {depth} were asked for")
        limit = llama_cpp.llama_n_batch(self.context)
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        steps = []
        for start in range(0, len(tokens), min(chunk, limit)):
            num = min(chunk, limit, len(tokens) - start)
            at = ctypes.cast(ctypes.byref(ids, 4 * start), ctypes.POINTER(ctypes.c_int32))
            steps.append(llama_cpp.llama_batch_get_one(at, num))
        started = time.perf_counter()
        for step in steps:
            status = llama_cpp.llama_decode(self.context, step)
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
            llama_cpp.llama_get_logits_ith(self.context, -1)  # waits until they are there
        seconds = time.perf_counter() - started
        num_threads = self.facts()["num_threads"]
        num_tokens = self._num_cached() - before
        return {"num_tokens": num_tokens, "seconds": seconds, "num_threads": num_threads}

    def _num_cached(self) -> int:
        return int(llama_cpp.llama_memory_seq_pos_max(self.memory, 0)) + 1

    def logits(self, tokens: list[int], out: str) -> Facts:
        """Write the logits after each token, f32 [num_tokens, vocab_size], to `out`."""
        llama_cpp.llama_memory_clear(self.memory, True)
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = 1
        status = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        shape = (len(tokens), self.vocab_size)
        np.save(out, np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.context), shape))
        return {"num_tokens": self._num_cached(), "num_threads": self.facts()["num_threads"]}

    def _note(self, level: int, text: bytes, data: Any) -> None:
        """Keep what the log says of choices that it makes alone, and of errors."""
        self.num_lines += 1
        line = text.decode(errors="replace").strip()
        is_telling = level == LOG_ERROR or "flash" in line.lower() or "buffer size" in line
        if level > LOG_DEBUG and is_telling and line not in self.notes:
            self.notes = [*self.notes, line][-40:]


def quantise(source: str, out: str, kind: str, num_threads: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = int(num_threads)
    status = llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(params))
    if status:
        sys.exit(f"llama_model_quantize returned {status}")


def _file_type(number: int) -> str:
    """The name without prefix of an `enum llama_ftype`."""
    for name in dir(llama_cpp):
        if name.startswith("LLAMA_FTYPE_") and getattr(llama_cpp, name) == number:
            return name.removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_")
    return f"llama_ftype {number}"


def main() -> None:
    if sys.argv[1:2] == ["quantise"]:
        quantise(*sys.argv[2:])
    elif sys.argv[1:2] == ["version"]:
        print(llama_cpp.__version__)
    else:
        peer = Peer()
        serve(
            {
                "load": peer.load, "facts": peer.facts, "prefill": peer.prefill,
                "decode": peer.decode, "logits": peer.logits, "memory": memory_facts,
            }
        )  # fmt: skip


if __name__ == "__main__":
    main()
