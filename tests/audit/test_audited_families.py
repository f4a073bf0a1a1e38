"""The audit of a synthetic model of each family: which gates it passes, which it cannot have."""

from __future__ import annotations

from pathlib import Path

import pytest
from models.encoder_gguf import make_encoder
from models.families import make_family
from models.family_table import FAMILIES

from hypocenter import LLM
from hypocenter.audit.equivalence import AuditSizes, OwnGates
from hypocenter.audit.executed import OwnRecord
from hypocenter.audit.repeats import repeats
from hypocenter.audit.residency import residency
from hypocenter.audit.ways import Ways
from hypocenter.record import recorder
from hypocenter.verify.outcome import StageVerdict

NOT_RUN = StageVerdict.NOT_RUN
#: In F32 no op of these is fused: nothing is rotated, a latent is, the norms of heads come behind
#: it, or q has a table of its own.
UNFUSED = (
    "mamba",
    "deepseek2",
    "minicpm3",
    "granitehybrid",
    "hunyuan-dense",
    "mistral3-scaled",
    "bert",
)
#: They read a text at once, and write none.
ENCODERS = ("bert", "nomic-bert", "gemma-embedding")
SIZES = AuditSizes(read=40, asked=20, answered=4, chunks=(1, 7), batches=(3, 8))


@pytest.mark.tier("sim", fast=lambda case: case.name in ("granitehybrid-moe", "hunyuan-dense"))
@pytest.mark.parametrize("name", [*FAMILIES, *ENCODERS])
def test_a_model_of_a_family_passes_its_gates(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HYPO_RECORD", raising=False)
    recorder.close_recorder()
    make = make_encoder if name in ENCODERS else make_family
    path = make(name, tmp_path).path
    context = None if name in ENCODERS else 64  # one may see less far
    with LLM(
        path, context_length=context, kv_tokens=1024, max_batch_requests=8, prefix_cache=False
    ) as llm:
        own = OwnGates(Ways(llm, OwnRecord(), "cpu"), SIZES, 0.0)
        stages = [gate.run() for gate in own.each()]
        stages += [residency(own.ways, 5, 3), repeats(own, 2).run()]
    recorder.close_recorder()
    wrong = [stage for stage in stages if stage.verdict not in (StageVerdict.RIGHT, NOT_RUN)]
    assert not wrong, [(stage.name, stage.verdict, stage.findings[:2]) for stage in wrong]
    not_run = {stage.name for stage in stages if stage.verdict is NOT_RUN}
    assert not_run == _without(name)


def _without(name: str) -> set[str]:
    """The gates that a family cannot have on a CPU."""
    unfused = {"forms"} if name.startswith(UNFUSED) else set()
    if name in ENCODERS:
        return {"graphs", "chunks", "pages", "decode"} | unfused
    keeps_no_keys = {"pages"} if name.startswith("mamba") else set()
    return {"graphs"} | keeps_no_keys | unfused
