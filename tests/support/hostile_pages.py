"""Bundles with a text that would be markup wherever a text may stand, and their pages."""

from __future__ import annotations

from typing import Any

import msgspec
from bundles import DEVICE, Run, crash, decoder, inputs, tensors_of_decoder

from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.page.page import report_html
from hypocenter.doctor.report_parts import Origin
from hypocenter.record.bundle import Bundle

HOSTILE = (
    "<script>alert(1)</script>", "</code></style><img src=x onerror=alert(1)>", "\" onload=\"x",
    "' autofocus '", "--><svg onload=x>", "]]><b>", "&lt;i&gt; &amp;", "`<b>` `", "a\nb\x00\x1b[2J",
    "\u202egnp.exe", "javascript:alert(1)", "${x}{{y}}",
)  # fmt: skip


def hostile_bundle(text: str) -> Bundle:
    """A crash in whose records `text` stands wherever a text may stand."""
    run = Run()
    tensors_of_decoder(run, positions={"dtype": "I16"})
    plan = decoder(run)
    run.run(plan, inputs())
    run.free("x", site=text)
    run.copy_out("out")
    bundle = run.bundle(crash(run.tensors["cos"].address + 4 * 16 * 65536))

    def name(record: Any, **fields: Any) -> Any:
        return msgspec.structs.replace(record, **fields)

    launches = tuple(
        name(launch, kernel=f"{launch.kernel}{text}", function=text, site=text, stream=text)
        if number != 1
        else name(launch, site=text, constants={**launch.constants, text: text})
        for number, launch in enumerate(bundle.plans[0].launches)
    )
    comment = text.replace("\n", "").replace("\0", "")
    sources = tuple(name(source, text=f"{source.text}\n# {comment}") for source in bundle.sources)
    events = tuple(
        name(event, allocation=name(event.allocation, name=text, owner=text, site=text))
        if hasattr(event, "allocation") and not isinstance(event.allocation, int)
        else event
        for event in bundle.events
    )
    fault = name(bundle.fault, message=text, call=text, error=text, stack=text)
    forged: Bundle = name(
        bundle, plans=(name(bundle.plans[0], name=text, launches=launches),), sources=sources,
        events=events, fault=fault, stderr=text, kernel_log=(text,), command=(text, text),
        environment={text: text}, platform=text, device=DEVICE,
        tensors=tuple(name(t, name=f"{t.name}{text}", owner=text) for t in bundle.tensors),
    )  # fmt: skip
    return forged


def page_of(bundle: Bundle) -> str:
    # Replays of forged sources are another test's.
    return report_html(bundle, diagnose(bundle, without=("replay",)), Origin("b"))
