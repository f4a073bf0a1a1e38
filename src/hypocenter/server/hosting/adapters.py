"""The adapters of one model, as clients name them, and what each counts for whom; no HTTP.

Two ways are honoured. As in llama-server, `lora` of a body lists adapters with their scales, those
that are not listed count nothing, and without it all count what the server says. As in vLLM, an
adapter's name as that of the model takes it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hypocenter.base.errors import BadSetting
from hypocenter.server.api_error import ApiError
from hypocenter.server.generation import AnswerOrder, AskedAdapter
from hypocenter.settings.adapters import AdapterChoice, Scales, adapter_scales, read_choice


@dataclass(slots=True)
class ServedAdapters:
    """`scales`: what each counts for requests that do not say."""

    choices: tuple[AdapterChoice, ...]
    scales: tuple[float, ...]

    @classmethod
    def of(cls, texts: Sequence[str]) -> ServedAdapters:
        """Those of an engine's settings."""
        choices = tuple(map(read_choice, texts))
        return cls(choices, tuple(choice.scale for choice in choices))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(choice.name for choice in self.choices)

    def apply(self, order: AnswerOrder) -> AnswerOrder:
        """The order with what each adapter counts for it. Raises ApiError."""
        if not self.choices:
            if order.lora:
                limit = "this model has no adapters; start the server with --lora"
                raise ApiError(400, limit, param="lora")
            return order
        if order.lora is not None:
            asked = self.read(order.lora)
        elif order.model in self.names:
            # One that is there to be asked for, and counts nothing by itself, counts in full.
            [given] = (choice for choice in self.choices if choice.name == order.model)
            asked = ((given.name, given.scale or 1.0),)
        else:
            asked = tuple(zip(self.names, self.scales, strict=True))
        return replace(order, params=replace(order.params, lora=asked))

    def read(self, items: Iterable[AskedAdapter]) -> Scales:
        """Names and scales of a list. Raises ApiError."""
        asked = []
        for item in items:
            if (item.id is None) == (item.name is None):
                raise ApiError(400, "lora: give an adapter's id or its name", param="lora")
            name = item.name
            if item.id is not None:
                if not 0 <= item.id < len(self.choices):
                    limit = f"must be from 0 to {len(self.choices) - 1}"
                    raise ApiError(400, f"lora: id is {item.id}, but {limit}", param="lora")
                name = self.names[item.id]
            elif name not in self.names:
                known = ", ".join(self.names)
                message = f"lora: there is no adapter {str(name)[:100]!r}; name one of: {known}"
                raise ApiError(400, message, param="lora")
            asked.append((name, item.scale))
        try:
            return adapter_scales(asked)
        except BadSetting as error:
            raise ApiError(400, str(error), param="lora") from error

    def set_scales(self, items: Iterable[AskedAdapter]) -> None:
        """What is listed counts so from now on, and all others nothing. Raises ApiError."""
        found = dict(self.read(items))
        self.scales = tuple(found.get(name, 0.0) for name in self.names)


#: Of a model without any.
def no_adapters() -> ServedAdapters:
    return ServedAdapters((), ())
