"""Files as the world has them: made by llama.cpp's converter and quantiser of random models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from models.families import random_model
from models.family_table import FAMILIES, VOCAB_SIZE, Family
from repository import ROOT

from hypocenter.model.facts.families import FAMILIES as OUR_FAMILIES

WORKER = Path(__file__).with_name("convert_worker.py")
#: One converter makes all files; a model takes it about two seconds.
CONVERTER_SECONDS = 900
#: Sizes of which K quants have whole blocks; others fall back, as llama.cpp's quantiser does.
_WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "shared_intermediate_size": 256,
}
_WIDE_STATE = {
    "Mamba2": {"num_heads": 8, "head_dim": 64},
    # Of a dense one, converters take the shared expert to be as wide as the feed-forward.
    "GraniteMoeHybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "shared_intermediate_size": 512,
    },
    "GptOss": {"intermediate_size": 256},
    # Converters take it for granted, as the published one has it: values so wide, and four times.
    "MiniCPM3": {"v_head_dim": 64},
    "Phi": {"intermediate_size": 1024},
}
_GRANITE_LAYERS = {"full_attention": "attention", "linear_attention": "mamba"}
#: Beside one for each architecture: those whose files have more, or other, tensors and keys.
_MORE = (
    "llama-rope-factors", "llama-tied", "mixtral", "mistral", "qwen2-yarn",
    "deepseek2-glm", "granitehybrid-moe", "granitemoe-shared", "falcon-h1-normed",
    "glm4moe-qk-norm", "gemma4-experts", "gemma4-e", "olmo3",
    "starcoder2-untied",
)  # fmt: skip
#: Which of several stands for its architecture, where it is not the first that llama.cpp runs.
_CHOSEN = {"deepseek2": "deepseek2-v3", "mistral3": "mistral3-scaled", "stablelm": "stablelm"}
#: As the table of families has them: of sizes that no K quant has blocks for.
_ODD = (
    "qwen35-tied", "gemma4-odd", "granitehybrid-moe", "mamba2", "qwen2moe",
    "phi3-longrope-short",
)  # fmt: skip


#: Architectures that give logits; those of encoders give none to compare.
WRITING = tuple(arch for arch, family in OUR_FAMILIES.items() if not family.sees_all)


def _of_each_architecture() -> Iterable[str]:
    for arch in WRITING:
        yield _CHOSEN.get(arch) or next(
            name
            for name, family in FAMILIES.items()
            if family.arch == arch and family.llama_cpp_agrees
        )


#: Names of the models: those of the table of families, "odd/" before those that are not widened.
NAMES = (*dict.fromkeys((*_of_each_architecture(), *_MORE)), *(f"odd/{name}" for name in _ODD))


#: Models that the converter makes no file of, and what it says.
UNMADE = {
    # What is to give the norms of all heads as one tensor is left before it gives any.
    "stablelm-12b": "Unprocessed norms",
}
#: So many are converted together.
_BATCH = 11


@dataclass(frozen=True)
class Converted:
    """A random model whose weights are numbers of f16, a text for it, and its file."""

    name: str
    family: Family
    hf_model: Any
    token_ids: list[int]
    path: Path

    @property
    def context_length(self) -> int:
        """Positions to open the file with: RoPE factors of llama.cpp go by them."""
        return self.family.context_length if self.family.arch == "phi3" else 128

    def require_file(self) -> None:
        """Raises RuntimeError with the converter's own words where it made none."""
        if not self.path.exists():
            error = self.path.with_name(f"{self.path.name}.error")
            raise RuntimeError(error.read_text() if error.exists() else "no file was made")


@dataclass
class Converter:
    """Makes models when they are asked for, some at a time."""

    folder: Path
    made: dict[str, Converted] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Converted:
        if name not in self.made:
            self.made.clear()
            start = NAMES.index(name) // _BATCH * _BATCH
            self.made = make_converted(NAMES[start : start + _BATCH], self.folder)
        return self.made[name]


def make_converted(names: Iterable[str], folder: Path) -> dict[str, Converted]:
    """The models of those names, each saved as transformers saves them and converted to F16.

    Raises RuntimeError where PEER_SOURCES names no sources of llama.cpp, or the converter ends.
    """
    sources = Path(os.environ.get("PEER_SOURCES", "")) / "vendor/llama.cpp"
    if not (sources / "convert_hf_to_gguf.py").is_file():
        raise RuntimeError(f"{sources} has no converter; run scripts/test-peers, which unpacks one")
    made, jobs = {}, []
    for name in names:
        family = _family(name)
        hf_model, token_ids = random_model(name, family)
        with torch.no_grad():
            for parameter in hf_model.parameters():
                parameter.copy_(parameter.half().float())
        stem = name.replace("/", "-")
        _save(family, hf_model, folder / stem)
        path = folder / f"{stem}-F16.gguf"
        made[name] = Converted(name, family, hf_model, token_ids, path)
        job = {"folder": str(folder / stem), "out": str(path)}
        jobs.append({**job, "vocabulary": family.vocabulary, "pre": family.pre})
    all_jobs = folder / "jobs.json"
    all_jobs.write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, WORKER, sources, all_jobs],
        capture_output=True,
        text=True,
        timeout=CONVERTER_SECONDS,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests/support")},
    )
    if done.returncode != 0:
        raise RuntimeError(f"convert_worker.py: {done.stderr[-4000:]}")
    return made


def _save(family: Family, hf_model: Any, folder: Path) -> None:
    """As transformers saves it, with what configurations of published models have and this version
    of transformers has not."""
    hf_model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if family.model_class in ("DeepseekV3", "Glm4MoeLite"):
        config["scoring_func"] = "sigmoid"
    if family.model_class == "GraniteMoeHybrid":
        config["layer_types"] = [_GRANITE_LAYERS[kind] for kind in config["layer_types"]]
    path.write_text(json.dumps(config))
    # Gemma's converter counts the tokens there.
    vocabulary = {"model": {"vocab": dict.fromkeys(range(VOCAB_SIZE))}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))


def _family(name: str) -> Family:
    if name.startswith("odd/"):
        return FAMILIES[name.removeprefix("odd/")]
    family = FAMILIES[name]
    config = dict(family.config)
    wide = {**_WIDE, **_WIDE_STATE.get(family.model_class, {})}
    config |= {key: size for key, size in wide.items() if key in config}
    has_heads = {"num_attention_heads", "num_key_value_heads"} <= config.keys()
    if has_heads and "v_head_dim" not in config:
        num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        config["num_attention_heads"] = 4
        config["num_key_value_heads"] = 4 if num_kv_heads == num_heads else min(num_kv_heads, 2)
    return replace(family, config=config)
