"""Collects the training text: the running Python's standard library, without its tests.

Writes JSON `{"train": [text, ...], "validation": [text, ...]}`. Knows nothing of tokens.
"""

from __future__ import annotations

import json
import random
import sysconfig
from pathlib import Path

import cyclopts

from tools.demo_model.recipe import Recipe

#: Folders whose text is not library code: tests, tables, vendored or generated files.
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "encodings",
        "ensurepip",
        "idle_test",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


def collect(root: Path, recipe: Recipe) -> dict[str, list[str]]:
    """Read every Python file under `root`; raises ValueError when fewer than two qualify.

    The order is that of the sorted paths, shuffled with `corpus_seed`; files that are not UTF-8
    (the library has a few on purpose) are left out.
    """
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)
    ]
    random.Random(recipe.corpus_seed).shuffle(paths)
    texts = []
    for path in paths:
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) > recipe.min_document_chars:
            texts.append(text)
    if len(texts) < 2:
        raise ValueError(f"{root}: {len(texts)} usable Python files, but at least 2 are needed")
    num_validation = max(1, len(texts) // recipe.validation_share)
    return {"train": texts[num_validation:], "validation": texts[:num_validation]}


def main(output: Path = Path("corpus.json"), *, root: Path | None = None) -> None:
    """Write the corpus.

    Parameters
    ----------
    output
        JSON file to write.
    root
        Folder to read; the running Python's standard library by default.
    """
    corpus = collect(root or Path(sysconfig.get_paths()["stdlib"]), Recipe())
    output.write_text(json.dumps(corpus), "utf-8")
    for part, texts in corpus.items():
        print(f"{part}: {len(texts)} files, {sum(map(len, texts))} characters")


if __name__ == "__main__":
    cyclopts.run(main)
