"""lm-eval's `local-completions` against `hypo serve`: the numbers are those of the Python API.

The task is one of ours, in files that the test writes: nothing is fetched. Tokens come by
`/tokenizer_info` and `/tokenize`, lm-eval's remote tokenizer.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from clients.conftest import KEY, OURS

ROWS = [
    {"context": "import", "right": " os", "wrong": " zebra"},
    {"context": "def main(", "right": "):", "wrong": " banana"},
    {"context": "for i in", "right": " range(10):", "wrong": " Ünïcödé"},
    {"context": "class Node:\n    def __init__(self", "right": ", name):", "wrong": "!!"},
]
CHOICE = """
task: ours_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: choices
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
FREE = """
task: ours_free
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{right}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 24, do_sample: false, temperature: 0.0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def expected(python: str, model: Path) -> Any:
    questions = {
        "pairs": [[row["context"], row[which]] for row in ROWS for which in ("right", "wrong")],
        "prompts": [row["context"] for row in ROWS], "max_tokens": 24, "stop": ["\n\n"],
    }  # fmt: skip
    done = subprocess.run(
        [python, OURS, "numbers", model], input=json.dumps(questions), capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    rows = folder / "rows.jsonl"
    whole: list[Any] = [{**row, "choices": [row["right"], row["wrong"]]} for row in ROWS]
    rows.write_text("".join(json.dumps(row) + "\n" for row in whole))
    for name, text in (("choice", CHOICE), ("free", FREE)):
        (folder / f"{name}.yaml").write_text(text.format(rows=rows))
    return folder


def local_completions(url: str, **more: Any) -> Any:
    return LocalCompletionsAPI(
        base_url=f"{url}/completions", model="chat", tokenizer_backend="remote",
        max_length=512, num_concurrent=4, max_retries=1, auth_token=KEY, **more,
    )  # fmt: skip


def evaluate(url: str, tasks: Path, task: str, **more: Any) -> list[Any]:
    """The answers to each row, in the order of the rows."""
    model = local_completions(url, **more)
    found = simple_evaluate(
        model, tasks=[task], task_manager=TaskManager(include_path=str(tasks)), bootstrap_iters=0
    )
    assert found is not None
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(ROWS)
    return [sample["resps"] for sample in samples]


def test_the_tokenizer_is_taken_over(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    tokenizer: Any = local_completions(url).tokenizer
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|begin_of_text|>", 0)
    assert tokenizer.decode(tokenizer.encode("def f(x):\n")) == "def f(x):\n"
    assert tokenizer.encode(tokenizer.eos_token) == [tokenizer.eos_token_id]


def test_loglikelihoods(
    url: str, tasks: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of token ids; of texts lm-eval counts tokens without the BOS that a server adds."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    answers = evaluate(url, tasks, "ours_choice", tokenized_requests=True)
    found = [(float(one[0]), bool(one[1])) for row in answers for [one] in row]
    wanted = [(float(logprob), is_greedy) for logprob, is_greedy in expected["pairs"]]
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert [logprob for logprob, _ in found] == pytest.approx(
        [logprob for logprob, _ in wanted], abs=1e-4
    )


def test_texts_up_to_a_stop(
    url: str, tasks: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    answers = evaluate(url, tasks, "ours_free", tokenized_requests=False)
    assert [one for [[one]] in answers] == expected["texts"]
