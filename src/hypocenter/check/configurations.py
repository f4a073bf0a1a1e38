"""The configurations of an autotuned kernel: which of them run the same programs, and their names.

Runs none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypocenter.device.triton_lang import triton


def configurations_once(
    tuner: Any, configs: Sequence[Any], arguments: Mapping[str, Any]
) -> list[list[Any]]:
    """The configs in their order, those that run the same programs in one list.

    They do when they differ in nothing that the kernel, its heuristics or their own hook can see:
    in num_warps and num_stages, as a rule. `arguments` are the launch's, by name.
    """
    groups: list[tuple[Any, list[Any]]] = []
    for config in configs:
        seen = _visible_facts(tuner, config, arguments)
        same = next((members for key, members in groups if key == seen), None)
        if same is None:
            groups.append((seen, [config]))
        else:
            same.append(config)
    return [members for _, members in groups]


def _visible_facts(tuner: Any, config: Any, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of a configuration the launch's programs can tell."""
    every = config.all_kwargs()
    given = {**arguments, **every}
    chosen: dict[str, Any] = {}
    below = tuner.fn
    while hasattr(below, "fn"):
        if isinstance(below, triton.runtime.autotuner.Heuristics):
            for name, value_of in below.values.items():
                chosen[name] = given[name] = value_of(given)
        if isinstance(below, triton.runtime.jit.JITFunction):
            break
        below = below.fn
    names = {*config.kwargs, *getattr(below, "arg_names", ())}
    visible = {name: value for name, value in every.items() if name in names}
    return visible, chosen, config.pre_hook


def configuration_text(same: Sequence[Any]) -> str:
    """The constants of configurations that run the same programs, and the options of each.

    An option that varies is told by its values: "BLOCK=64, num_warps=4|8, num_stages=3".
    """
    words = [f"{name}={value}" for name, value in same[-1].kwargs.items()]
    for option in ("num_warps", "num_stages"):
        values = dict.fromkeys(getattr(config, option) for config in same)
        words.append(f"{option}={'|'.join(map(str, values))}")
    return ", ".join(words)
