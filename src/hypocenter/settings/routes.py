"""Ops that have more than one form on a device, by the names of `hypo run --route`.

What each form launches is known by the decoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from hypocenter.base.errors import UsageError

#: Forms of each op, the usual one first. `parts`: one launch for each part, where the usual form
#: joins several: a norm or a gate and the codes of what it makes, the rotation of q and k and the
#: write to the cache, all of attention (GPU). `bf16`: products of bf16 weights round what they
#: read (CPU).
ROUTES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "norm": ("fused", "parts"),
        "gate": ("fused", "parts"),
        "rope": ("fused", "parts"),
        "attention": ("fused", "parts"),
        "float_products": ("exact", "bf16"),
    }
)
#: Those of them that are settings of an engine.
OF_CONFIG = ("attention", "float_products")


def read_routes(words: Iterable[str]) -> dict[str, str]:
    """The form of each op named in texts such as `norm=parts,rope=parts`. Raises UsageError."""
    routes: dict[str, str] = {}
    for word in (part.strip() for text in words for part in text.split(",")):
        op, _, form = word.partition("=")
        if op not in ROUTES:
            raise UsageError(
                f"--route {word}: there is no op {op!r}; there are {', '.join(ROUTES)}"
            )
        if form not in ROUTES[op]:
            forms = " or ".join(ROUTES[op])
            raise UsageError(f"--route {word}: {op} has no form {form!r}; give {forms}")
        if routes.setdefault(op, form) != form:
            raise UsageError(f"--route {word}: {op} is given as {routes[op]} too; give one")
    return routes
