"""Runs llama.cpp's own converter over folders of transformers models; compares nothing.

Arguments: the folder of llama.cpp's sources, and a file of jobs as JSON. One process does all, for
what takes the time is the import of transformers. One thing of the converter is replaced: what
reads the tokenizer of the folder, for a random model has none. All that concerns weights and their
metadata is the converter's.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path


def convert(job: dict[str, str]) -> None:
    """Write the F16 file of one model; raises what the converter raises."""
    import torch
    from conversion import (  # type: ignore[import-not-found] # of the sources given
        ModelBase,
        ModelType,
        get_model_architecture,
        get_model_class,
    )
    from gguf import LlamaFileType
    from models.family_gguf import add_vocabulary

    folder = Path(job["folder"])
    hparams = ModelBase.load_hparams(folder, False)
    kind = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    # As --no-nextn: random models have no layers that only draft.
    kind.no_mtp = kind.supports_mtp_export
    with torch.inference_mode():
        model = kind(folder, LlamaFileType.MOSTLY_F16, Path(job["out"]), model_name="random model")
        part = getattr(model, "impl", model)  # one converter hands all over to another
        part.set_vocab = lambda: add_vocabulary(part.gguf_writer, job["vocabulary"], job["pre"])
        model.write()


def main() -> None:
    sources, jobs = Path(sys.argv[1]), Path(sys.argv[2])
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    for job in json.loads(jobs.read_text()):
        try:
            convert(job)
        except Exception:  # told by the test of that model
            Path(job["out"]).unlink(missing_ok=True)
            Path(f"{job['out']}.error").write_text(traceback.format_exc())


if __name__ == "__main__":
    main()
