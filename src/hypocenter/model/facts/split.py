"""The architecture of one rank's shard of a model, and which models have no shards."""

from __future__ import annotations

from dataclasses import replace

from hypocenter.base.errors import BadSetting
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.facts.part import Part


def part_of(arch: Architecture, part: Part) -> Architecture:
    """The architecture of one shard. Raises BadSetting where the model cannot be split so."""
    num_parts = part.num_parts
    if num_parts == 1:
        return arch
    if problem := _obstacle(arch):
        raise cannot_split(arch, num_parts, problem)
    counts = {"heads": arch.num_heads}
    for shape in arch.layers:
        if shape.num_kv_heads >= num_parts or num_parts % shape.num_kv_heads:
            counts["key-value heads"] = shape.num_kv_heads
        counts["inner columns"] = shape.ffn_width
        for what, count in counts.items():
            if count % num_parts:
                problem = f"{count} {what} have no {num_parts} equal parts"
                raise cannot_split(arch, num_parts, problem)
    experts = arch.experts
    if experts is not None:
        for width in (experts.width, experts.shared_width):
            if width % num_parts:
                problem = f"experts of {width} inner columns have no {num_parts} equal parts"
                raise cannot_split(arch, num_parts, problem)
        experts = replace(
            experts,
            width=experts.width // num_parts,
            shared_width=experts.shared_width // num_parts,
        )
    layers = tuple(
        replace(
            shape,
            # Where there are fewer, each has copies.
            num_kv_heads=max(shape.num_kv_heads // num_parts, 1),
            ffn_width=shape.ffn_width // num_parts,
        )
        for shape in arch.layers
    )
    return replace(
        arch,
        num_heads=arch.num_heads // num_parts,
        layers=layers,
        experts=experts,
        part=part,
    )


def _obstacle(arch: Architecture) -> str:
    """Why models like this one are not split; empty where they are."""
    family = arch.family
    if arch.latent is not None:
        return "its heads share one latent"
    if arch.recurrence is not None:
        return "its layers carry states"
    if arch.pooling is not None:
        return "it makes vectors of texts"
    if arch.input_width:
        return "its layers have embeddings of their own"
    if family.wide_qk_norm:
        return "a norm goes over all heads"
    if family.experts is not None and family.experts.stands_beside:
        return "experts stand beside a dense feed-forward"
    return ""


def cannot_split(arch: Architecture, num_parts: int, problem: str) -> BadSetting:
    """The error that says why a model has no such parts."""
    limit = f"{arch.name} cannot be split so: {problem}; take 1"
    return BadSetting("tensor_parallel", num_parts, limit)
