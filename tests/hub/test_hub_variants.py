"""Which files of a repository are one model, and which of its models is meant."""

from __future__ import annotations

import pytest

from hypocenter.base.errors import ModelNotFound
from hypocenter.hub.names import HubName
from hypocenter.hub.variants import RemoteFile, choose, variants_of

GIB = 1 << 30
#: Sizes in GiB, as of a model of eight billion parameters.
USUAL = {
    "IQ2_XXS": 2.3, "Q2_K": 3.1, "Q3_K_M": 3.8, "Q4_0": 4.4, "Q4_K_S": 4.5, "Q4_K_M": 4.7,
    "Q5_K_M": 5.4, "Q6_K": 6.3, "Q8_0": 8.1, "BF16": 15.3,
}  # fmt: skip


def files(**gib: float) -> list[RemoteFile]:
    return [RemoteFile(f"Some-8B-{label}.gguf", int(size * GIB)) for label, size in gib.items()]


def chosen(listed: list[RemoteFile], tag: str = "", room_gib: float | None = None) -> str:
    room = None if room_gib is None else int(room_gib * GIB)
    return choose(HubName("a/b", tag), variants_of(listed), room_bytes=room).label


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"), ("model.Q4_K_M.gguf", "Q4_K_M"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"), ("gemma-3-4b-it-qat-q4_0.gguf", "Q4_0"),
        ("Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"), ("phi-3-mini-4k-instruct-fp16.gguf", "FP16"),
        ("x-IQ4_XS.gguf", "IQ4_XS"), ("Q8_0/a-thing.gguf", "Q8_0"), ("BF16/m-BF16.gguf", "BF16"),
        ("tinyllama.gguf", ""), ("x-TQ1_0.gguf", "TQ1_0"), ("EQ8_0.gguf", ""),
    ],
)  # fmt: skip
def test_a_file_is_labelled_by_the_end_of_its_name(path: str, label: str) -> None:
    [variant] = variants_of([RemoteFile(path, 1)])
    assert (variant.label, variant.path) == (label, path)


def test_parts_are_one_model_and_a_lost_part_is_none() -> None:
    def part(number: int, num_parts: int, label: str = "BF16") -> RemoteFile:
        return RemoteFile(f"{label}/m-{label}-{number:05}-of-{num_parts:05}.gguf", 10)

    listed = [part(2, 3), part(1, 3), part(3, 3), part(1, 2, "Q8_0")]
    [variant] = variants_of(listed)
    assert (variant.label, variant.num_bytes) == ("BF16", 30)
    assert [file.path[-18:-14] for file in variant.files] == ["0001", "0002", "0003"]


def test_what_is_no_model_is_left_out() -> None:
    paths = [
        "README.md",
        "mmproj-F16.gguf",
        "m.imatrix.gguf",
        "imatrix.gguf",
        "model-mmproj-f16.gguf",
    ]
    assert variants_of([RemoteFile(path, 1) for path in paths]) == []


@pytest.mark.parametrize(
    ("room_gib", "label"),
    [(None, "Q4_K_M"), (64, "Q4_K_M"), (5.5, "Q4_K_M"), (5.3, "Q4_K_S"), (5.1, "Q4_0"),
     (4.5, "Q3_K_M"), (4.0, "Q2_K"), (3.4, "IQ1_M")],
)  # fmt: skip
def test_without_a_tag_it_is_four_bits_or_what_has_room(room_gib: float | None, label: str) -> None:
    """IQ2_XXS takes more memory than its file has bytes."""
    assert chosen(files(**USUAL, IQ1_M=1.3), room_gib=room_gib) == label


@pytest.mark.parametrize(
    ("labels", "label"),
    [
        (["Q8_0", "F16"], "Q8_0"), (["Q2_K", "Q8_0"], "Q8_0"), (["Q2_K", "Q3_K_S"], "Q3_K_S"),
        (["IQ1_S", "IQ2_M"], "IQ2_M"), (["UD-Q4_K_M", "Q5_K_M"], "UD-Q4_K_M"),
        (["IQ4_XS", "Q6_K"], "IQ4_XS"), (["F16"], "F16"),
    ],
)  # fmt: skip
def test_where_the_usual_is_missing_the_next_is_taken(labels: list[str], label: str) -> None:
    assert chosen(files(**{one: 1 + at for at, one in enumerate(labels)})) == label


def test_a_tag_is_taken_as_people_write_it() -> None:
    listed = [*files(**USUAL), *files(**{"UD-Q4_K_XL": 4.8, "UD-Q2_K": 3})]
    assert chosen(listed, "q5_k_m") == "Q5_K_M"
    assert chosen(listed, "Q4_K_XL") == "UD-Q4_K_XL"
    assert chosen(listed, "UD-Q2_K") == "UD-Q2_K"
    assert chosen(listed, "Q2_K", room_gib=1) == "Q2_K", "who asks for one gets it"
    path = "Some-8B-Q8_0.gguf"
    assert choose(HubName("a/b", file=path), variants_of(listed)).path == path


@pytest.mark.parametrize(
    ("tag", "room_gib", "says"),
    [
        ("Q9_K", None, "a/b has no Q9_K; it has IQ4_KT (2.00 GiB), IQ2_XXS (2.30 GiB)"),
        ("IQ4_KT", None, "IQ4_KT is of a type that hypocenter does not run yet; take one of "),
        ("", 1.0, "1.00 GiB of memory are free; none of them runs here"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_told_with_what_can(
    tag: str, room_gib: float | None, says: str
) -> None:
    with pytest.raises(ModelNotFound) as raised:
        chosen(files(**USUAL, IQ4_KT=2.0), tag, room_gib)
    assert says in str(raised.value)


def test_a_repository_of_other_files_says_so() -> None:
    with pytest.raises(
        ModelNotFound, match="a/b has no GGUF file; look for one that ends in -GGUF"
    ):
        choose(HubName("a/b"), variants_of([RemoteFile("model.safetensors", 5)]))


def test_a_long_list_is_cut() -> None:
    many = [RemoteFile(f"m{number}.gguf", number) for number in range(1, 40)]
    with pytest.raises(ModelNotFound, match=r"m12\.gguf \(12 B\) and 27 more"):
        choose(HubName("a/b", "Q1"), variants_of(many))
