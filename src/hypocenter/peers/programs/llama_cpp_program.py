"""Run by an interpreter that has llama-cpp-python: one prompt, and what tensors of the graph held.

Arguments: the model, a file of the order as JSON, the file to write (npz). It imports nothing of
this package, for the two need not be installed beside each other. llama.cpp calls `cb_eval` before
and after each node of its graph; the names of nodes are those of its own `cb` in `llama-graph.cpp`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

#: Names of its nodes, and the points that hold the same.
POINTS = {
    "embd": "embedding",
    "inp_embd": "embedding",
    "attn_norm": "attn_norm",
    "Qcur": "q",
    "Kcur": "k",
    "Vcur": "v",
    "kqv_out": "attention",
    "ffn_inp": "attn_residual",
    "ffn_norm": "ffn_norm",
    "l_out": "layer_out",
    "result_norm": "result_norm",
    "result_output": "logits",
}
#: A node of the same name that has turned q and k by their positions, and the points of that.
ROTATED = {"Qcur": "q_rope", "Kcur": "k_cache"}
#: Ops by which q, k and v are made, before norms of heads and before the rotation.
PRODUCTS = ("MUL_MAT", "ADD", "RESHAPE", "VIEW", "CONT", "CLAMP")


def point_of(node: str, op: str) -> str | None:
    """The point that a node holds as `NAME/LAYER`, the layer empty for the whole step."""
    name, _, layer = node.partition("-")
    point = POINTS.get(name)
    if point is None or (layer and not layer.isdecimal()):
        return None
    if name in ("Qcur", "Kcur", "Vcur"):
        if op == "ROPE":
            point = ROTATED.get(name)
        elif op not in PRODUCTS:
            return None
    return None if point is None else f"{point}/{layer}"


class Watched:
    """Keeps what the nodes of one graph held, f32 [num_tokens, columns]."""

    def __init__(self, library: Any, num_tokens: int) -> None:
        self.held: dict[str, Any] = {}
        self.error = ""
        self._num_tokens = num_tokens
        self._name, self._op = library.ggml_get_name, library.ggml_op_desc
        self._numel, self._nbytes = library.ggml_nelements, library.ggml_nbytes
        self._is_contiguous, self._get = library.ggml_is_contiguous, library.ggml_backend_tensor_get
        for function, result in (
            (self._name, ctypes.c_char_p),
            (self._op, ctypes.c_char_p),
            (self._numel, ctypes.c_int64),
            (self._nbytes, ctypes.c_size_t),
            (self._is_contiguous, ctypes.c_bool),
        ):
            function.restype, function.argtypes = result, [ctypes.c_void_p]
        self._get.restype = None
        self._get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]

    def see(self, tensor: int, is_question: bool, _: object) -> bool:
        """Called before a node (whether it is wanted) and behind it (whether to go on)."""
        try:
            place = point_of(self._name(tensor).decode(), self._op(tensor).decode())
            if place is None:
                return not is_question
            if not is_question:
                self._keep(tensor, place)
        except Exception as error:  # nothing may be raised through the caller, which is C
            self.error = self.error or repr(error)
        return True

    def _keep(self, tensor: int, place: str) -> None:
        import numpy as np

        num, num_bytes = self._numel(tensor), self._nbytes(tensor)
        if num_bytes != 4 * num or num % self._num_tokens or not self._is_contiguous(tensor):
            return  # of another type, or of some rows alone
        found = np.empty((self._num_tokens, num // self._num_tokens), np.float32)
        self._get(tensor, found.ctypes.data, 0, num_bytes)
        self.held[place] = found


def tokens_of(llama: Any, vocabulary: Any, text: str) -> list[int]:
    """What its own tokenizer makes of the text."""
    raw = text.encode()
    ids = (llama.llama_token * (len(raw) + 16))()
    num = llama.llama_tokenize(vocabulary, raw, len(raw), ids, len(ids), True, False)
    return list(ids[: max(num, 0)])


def evaluate(llama: Any, model: Any, token_ids: list[int]) -> Watched:
    """All tokens in one batch on the CPU, with logits of each."""
    num = len(token_ids)
    watched = Watched(llama.llama_cpp._lib, num)
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = num
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    params.flash_attn_type = 0  # with it there is no node behind attention alone
    callback = llama.ggml_backend_sched_eval_callback(watched.see)
    params.cb_eval = callback
    context = llama.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("llama.cpp made no context for this model")
    batch = llama.llama_batch_init(num, 0, 1)
    batch.n_tokens = num
    for at, token in enumerate(token_ids):
        batch.token[at], batch.pos[at] = token, at
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
        batch.logits[at] = True
    if code := llama.llama_decode(context, batch):
        raise SystemExit(f"llama_decode returned {code}")
    if watched.error:
        raise SystemExit(f"its callback failed: {watched.error}")
    return watched


def main() -> None:
    """Run the order: `token_ids`, and `text`, which its own tokenizer reads as well."""
    model_path, order_path, out = sys.argv[1:4]
    import llama_cpp
    import numpy as np

    order = json.loads(Path(order_path).read_text())
    llama_cpp.llama_backend_init()
    with contextlib.redirect_stdout(sys.stderr):
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        model = llama_cpp.llama_model_load_from_file(model_path.encode(), params)
        if not model:
            raise SystemExit(f"llama.cpp cannot load {model_path}")
        ids = tokens_of(llama_cpp, llama_cpp.llama_model_get_vocab(model), order["text"])
        watched = evaluate(llama_cpp, model, order["token_ids"])
    said = {"version": f"llama-cpp-python {llama_cpp.__version__}", "token_ids": ids}
    np.savez(out, **watched.held, facts=np.frombuffer(json.dumps(said).encode(), np.uint8))


if __name__ == "__main__":
    try:
        main()
    except ModuleNotFoundError as missing:
        print(missing.name, file=sys.stderr)
        sys.exit(77)
