"""State spaces of files that contradict themselves, and models that have nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.families import hf_logits, make_family, new_model
from models.family_gguf import write_gguf
from models.family_table import FAMILIES

from hypocenter import LLM
from hypocenter.base.errors import BadModelFile, UnsupportedModel


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("granitehybrid", "ssm.group_count", 4, "ssm.time_step_rank is 6, but must be a multiple"),
        ("granitehybrid", "ssm.inner_size", 191, "ssm.inner_size is 191, but must be 6 heads of"),
        ("granitehybrid", "ssm.state_size", 25, "blk.0.ssm_in.weight shape is"),
        ("granitehybrid", "ssm.conv_kernel", 3, "ssm_conv1d.weight shape is"),
        ("granitehybrid", "ssm.time_step_rank", 0, "ssm.time_step_rank is 0"),
        ("granitehybrid", "attention.head_count_kv", [2, 2, 2], "attn_q.weight is missing"),
        ("mamba2", "ssm.time_step_rank", 4096, "ssm.inner_size is 192, but must be 4096 heads"),
        ("falcon-h1", "ssm.conv_kernel", 1, "ssm.conv_kernel is 1, but must be at least 2"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(
    name: str, key: str, value: Any, said: str, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    path = tmp_path / "wrong.gguf"
    wrong = replace(family, metadata={**family.metadata, key: value})
    write_gguf(wrong, new_model(family), path)
    with pytest.raises((BadModelFile, UnsupportedModel), match=said):
        LLM(path)


@pytest.mark.parametrize("attention", ["fused", "parts"])
@pytest.mark.tier("sim", fast=lambda case: case.attention == "parts")
def test_a_model_without_attention_answers_on_a_gpu(tmp_path: Path, attention: str) -> None:
    model = make_family("mamba2", tmp_path)
    prompt = model.token_ids[:4]
    with LLM(model.path, device="sim:mi300x", attention=attention, context_length=32) as llm:
        made = llm.generate(prompt, max_tokens=2, ignore_eos=True).token_ids
        llm.engine.check_integrity()
    for number, token in enumerate(made):
        theirs = hf_logits(model.hf_model, [*prompt, *made[:number]])[-1]
        assert int(np.argmax(theirs)) == token
