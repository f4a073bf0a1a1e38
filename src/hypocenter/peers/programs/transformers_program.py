"""Run by an interpreter that has transformers: one prompt, and what its modules gave and took.

Arguments: a GGUF file or a folder of a model, a file of the order as JSON, the file to write (npz).
It imports nothing of this package. A GGUF file is read by transformers' own reader, a folder from
safetensors alone, and no code of a model's author is run. All is f32 on the CPU, with attention in
its eager form, whose arguments are q, k and v behind their rotation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Modules below a layer, and the points that their output holds.
OUTPUTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
}
#: Norms before the feed-forward, the first that a layer has: what it takes and what it gives.
BEFORE_FFN = ("pre_feedforward_layernorm", "post_attention_layernorm")


class Hooks:
    """Keeps rows of tensors, f32 [num_tokens, columns], by `NAME/LAYER`."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}

    def keep(self, place: str, tensor: Any) -> None:
        if isinstance(tensor, tuple):
            tensor = tensor[0]
        rows = tensor.detach().float().cpu()
        self.held[place] = rows.reshape(-1, rows.shape[-1]).numpy().copy()

    def of_output(self, module: Any, place: str) -> None:
        module.register_forward_hook(lambda _, given, result: self.keep(place, result))

    def of_input(self, module: Any, place: str) -> None:
        module.register_forward_pre_hook(lambda _, given: self.keep(place, given[0]))


def hook(model: Any, hooks: Hooks) -> None:
    """Hook what this model has; what it has not stays out."""
    body = model.base_model
    hooks.of_output(model.get_input_embeddings(), "embedding/")
    hooks.of_output(model.get_output_embeddings(), "logits/")
    if hasattr(body, "norm"):
        hooks.of_output(body.norm, "result_norm/")
    for index, layer in enumerate(body.layers):
        modules = dict(layer.named_modules())
        for name, point in OUTPUTS.items():
            if name in modules:
                hooks.of_output(modules[name], f"{point}/{index}")
        if "self_attn.o_proj" in modules:
            hooks.of_input(modules["self_attn.o_proj"], f"attention/{index}")
        norm = next((modules[name] for name in BEFORE_FFN if name in modules), None)
        if norm is not None:
            hooks.of_input(norm, f"attn_residual/{index}")
            hooks.of_output(norm, f"ffn_norm/{index}")
        hooks.of_output(layer, f"layer_out/{index}")
    _hook_rotated(body.layers, hooks)


def _hook_rotated(layers: Any, hooks: Hooks) -> None:
    """Keep q, k and v as attention takes them: its eager form is a function of the model's file."""
    kinds = {
        sys.modules[type(layer.self_attn).__module__]
        for layer in layers
        if hasattr(layer, "self_attn")
    }
    for module in kinds:
        eager: Callable[..., Any] | None = getattr(module, "eager_attention_forward", None)
        if eager is None:
            continue

        def attend(
            of: Any,
            query: Any,
            key: Any,
            value: Any,
            *given: Any,
            eager: Callable[..., Any] = eager,
            **named: Any,
        ) -> Any:
            for name, x in (("q_rope", query), ("k_cache", key), ("v_cache", value)):
                hooks.keep(f"{name}/{of.layer_idx}", x.transpose(1, 2).flatten(2))
            return eager(of, query, key, value, *given, **named)

        module.eager_attention_forward = attend  # type: ignore[attr-defined]


def load(path: Path) -> Any:
    """The model in f32. Raises SystemExit where its weights do not fill it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
        )
    import gguf  # noqa: F401  # its reader says less clearly that this is missing
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    # What it reads is put in by hand: its own loading of such a file wants accelerate as well.
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    weights = {name: tensor.float() for name, tensor in read["tensors"].items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    if left := [name for name in missing if name not in tied and "rotary" not in name]:
        raise SystemExit(f"transformers' reader of GGUF leaves {left[0]} of {path.name} empty")
    if unexpected:
        raise SystemExit(f"transformers' reader of GGUF has {unexpected[0]}, and its model has not")
    return model


def main() -> None:
    """Run the order: `token_ids`."""
    model_path, order_path, out = sys.argv[1:4]
    import numpy as np
    import torch
    import transformers

    order = json.loads(Path(order_path).read_text())
    model, hooks = load(Path(model_path)).eval(), Hooks()
    hook(model, hooks)
    with torch.inference_mode():
        model(input_ids=torch.tensor([order["token_ids"]]), use_cache=False)
    said = {"version": f"transformers {transformers.__version__}", "token_ids": None}
    np.savez(out, **hooks.held, facts=np.frombuffer(json.dumps(said).encode(), np.uint8))


if __name__ == "__main__":
    try:
        main()
    except ModuleNotFoundError as missing:
        print(missing.name, file=sys.stderr)
        sys.exit(77)
