"""`hypo embed`: vectors of texts, or with a query how well each of them answers it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hypocenter.base.errors import UsageError
from hypocenter.cli.answer import open_llm
from hypocenter.cli.options import TextOptions
from hypocenter.cli.output import show, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.model.gguf.file import require_file
from hypocenter.settings.config import EngineConfig

#: Of a file of texts, one a line.
MAX_FILE_BYTES = 64 << 20


def embed(
    path: str,
    texts: Sequence[str],
    config: EngineConfig,
    options: TextOptions,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Print a line of numbers for each text, or of its score, the best first.

    Raises UsageError without a text, and for a model that gives something else.
    """
    require_file(Path(path))
    query, dimensions = options.query, options.dimensions
    texts = [*texts, *(_lines_of(options.file) if options.file is not None else ())]
    if not texts:
        raise UsageError("no text: give some behind the model, or -f FILE (-f - reads stdin)")
    with ProgressDisplay(quiet=quiet) as progress, open_llm(path, config, progress) as llm:
        if query is None:
            llm.embedding_size_for(dimensions)  # refused before anything runs
            vectors = llm.embed(texts, dimensions=dimensions, normalise=not options.raw)
            rows = [vector.reshape(-1, vector.shape[-1]) for vector in vectors]
        else:
            scores = llm.rerank(query, texts)
    if query is not None:
        best = sorted(range(len(texts)), key=lambda place: -scores[place])
        found = [{"index": n, "score": scores[n], "text": texts[n]} for n in best]
        if as_json:
            show_json({"results": found})
        else:
            show("\n".join(f"{scores[n]:9.6f} {n:5} {_one_line(texts[n])}" for n in best))
    elif as_json:
        show_json({"embeddings": [vector.tolist() for vector in vectors]})
    else:
        show("\n".join(" ".join(f"{x:.7g}" for x in row) for text in rows for row in text))


def _lines_of(file: str) -> list[str]:
    """Each line of a file that is not empty. Raises UsageError or OSError."""
    data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1) if file == "-" else _read(file)
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{file} has more than {MAX_FILE_BYTES} bytes; embed it in parts")
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: {error}") from None
    return [line for line in lines if line.strip()]


def _read(file: str) -> bytes:
    with open(file, "rb") as source:
        return source.read(MAX_FILE_BYTES + 1)


def _one_line(text: str) -> str:
    return " ".join(text.split())
