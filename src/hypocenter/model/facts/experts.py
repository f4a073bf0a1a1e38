"""A mixture of experts: what a GGUF file's metadata says of it.

Keys are those of the GGUF specification; what is fixed per family follows llama.cpp's src/models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hypocenter.base.errors import BadModelFile, UnsupportedModel
from hypocenter.kernels.experts.choice import BEST_OF_GROUP, ExpertChoice
from hypocenter.model.gguf.file import GGUFFile

MAX_EXPERTS = 1024
#: Kinds of scores by the numbers that files give them (llama.cpp `src/llama-hparams.h`).
_SCORES = {1: "softmax", 2: "sigmoid"}
_LARGEST_SCALE = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class ExpertsOfFamily:
    """What holds for the mixtures of a family where its files say nothing else.

    `are_optional`: files without experts are dense models. `share_width`: in files that do not say
    how wide experts are, those of a token are so together, and the shared one by itself.
    `has_gate`: the shared expert counts by a gate of its own. `has_bias`: files may hold a bias for
    the choice. `is_biased`: the router and all products of experts have biases. `stands_beside`:
    experts and a dense feed-forward read the same, each by a norm of its own, and both are added.
    """

    scores: str = "softmax"
    normalises: bool = True
    are_optional: bool = False
    share_width: bool = False
    has_gate: bool = False
    has_bias: bool = False
    is_biased: bool = False
    stands_beside: bool = False

    def has_factors(self, name: str) -> bool:
        """Whether the `.scale` beside a tensor counts for what its experts give, whatever type the
        tensor has."""
        return self.stands_beside and "ffn_down_exps." in name


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture that takes the place of the feed-forward, but in the first `num_dense` layers.

    Each of `choice.num_experts` experts is `width` wide, and the shared one, which every token
    takes, `shared_width`; 0: there is none.
    """

    choice: ExpertChoice
    width: int
    shared_width: int = 0
    num_dense: int = 0


def read_experts(
    file: GGUFFile,
    name: str,
    family: ExpertsOfFamily | None,
    *,
    num_layers: int,
    ffn_width: int,
    max_width: int,
) -> Experts | None:
    """The mixture of a model of architecture `name`; None for a dense one.

    Raises UnsupportedModel for experts that we do not run, BadModelFile for numbers that
    contradict one another.
    """
    full = f"{name}.expert_count"
    is_dense = family is None or family.are_optional
    num_experts = file.integer(full, 0 if is_dense else ..., low=0, high=MAX_EXPERTS)
    if not num_experts and is_dense:
        return None
    if num_experts == 1 and family is None:
        return None  # converters of Hunyuan's dense models write it
    if family is None:
        raise UnsupportedModel(file.path, full, num_experts, f"{name} models have no experts")
    num_experts = file.integer(full, low=1, high=MAX_EXPERTS)
    num_used = file.integer(f"{name}.expert_used_count", low=1, high=num_experts)
    width = max(ffn_width // num_used, 1) if family.share_width else ffn_width
    width = file.integer(f"{name}.expert_feed_forward_length", width, low=1, high=max_width)
    num_shared = file.integer(f"{name}.expert_shared_count", 0, low=0, high=MAX_EXPERTS)
    shared_width = ffn_width if family.has_gate else num_shared * width
    shared_width = file.integer(
        f"{name}.expert_shared_feed_forward_length", shared_width, low=0, high=max_width
    )
    scores = _scores(file, name, family, num_layers)
    num_groups, num_groups_used = _groups(file, name, num_experts, num_used, scores)
    choice = ExpertChoice(
        num_experts=num_experts,
        num_used=num_used,
        scores=scores,
        normalises=file.flag(f"{name}.expert_weights_norm", family.normalises),
        scale=_scale(file, name),
        has_gate=family.has_gate and shared_width > 0,
        num_groups=num_groups,
        num_groups_used=num_groups_used,
    )
    num_dense = file.integer(f"{name}.leading_dense_block_count", 0, low=0, high=num_layers)
    return Experts(choice, width, shared_width, num_dense)


def _groups(
    file: GGUFFile, name: str, num_experts: int, num_used: int, scores: str
) -> tuple[int, int]:
    """How many groups experts stand in, and from how many of them a token takes some."""
    full = f"{name}.expert_group_count"
    num_groups = file.integer(full, 1, low=0, high=MAX_EXPERTS) or 1
    if num_groups == 1:
        return 1, 1
    size, least = num_experts // num_groups, BEST_OF_GROUP[scores]
    if num_experts % num_groups or size < least:
        limit = f"must share {num_experts} experts evenly, at least {least} to a group"
        raise BadModelFile(file.path, full, num_groups, limit)
    full = f"{name}.expert_group_used_count"
    num_groups_used = file.integer(full, low=1, high=num_groups)
    if num_groups_used * size < num_used:
        limit = f"groups of {size} experts must have the {num_used} that a token takes"
        raise BadModelFile(file.path, full, num_groups_used, limit)
    return num_groups, num_groups_used


def _scores(file: GGUFFile, name: str, family: ExpertsOfFamily, num_layers: int) -> str:
    full = f"{name}.expert_gating_func"
    kind = file.integer(full, 0, low=0)
    if not kind:
        return "sigmoid" if _is_flash(file, name, num_layers) else family.scores
    if kind not in _SCORES:
        known = ", ".join(f"{number} ({scores})" for number, scores in _SCORES.items())
        raise UnsupportedModel(file.path, full, kind, f"known scores are {known}")
    return _SCORES[kind]


def _is_flash(file: GGUFFile, name: str, num_layers: int) -> bool:
    """Whether it is GLM-4.7-Flash, whose first files do not say what scores are.

    llama.cpp knows it by the same numbers (src/models/deepseek2.cpp).
    """
    if name != "deepseek2" or num_layers not in (47, 48):
        return False
    key = "tokenizer.ggml.tokens"
    num_tokens = len(file.strings(key)) if key in file.metadata else 0
    return file.integer(f"{name}.vocab_size", num_tokens, low=0) == 154_880


def _scale(file: GGUFFile, name: str) -> float:
    """What weights are multiplied by; files say 0 where there is nothing to multiply by."""
    full = f"{name}.expert_weights_scale"
    scale = file.number(full, 1.0)
    if abs(scale) > _LARGEST_SCALE:
        raise UnsupportedModel(file.path, full, scale, "it must be within the range of f32")
    return scale or 1.0
