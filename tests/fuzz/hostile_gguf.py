"""Hostile GGUF files for `hypo inspect`, the tokenizer and the engine; `scripts/test-fuzz` runs it.

Each input is a file of our own whose numbers, keys, texts or bytes tell lies. Each command must
refuse it in one line or read it, in bounded time and memory. Some are loaded and run as well.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from models import gguf_files as gf
from models.gguf_exercise import TRIED, refusal
from models.gguf_files import FileTensor, GGUFWriter, Item, array_of
from outside.hostile import TooSlow, answer_problem, limited_time, run_trials
from outside.terminal import hypo_in_process

from hypocenter.base.errors import HypoError
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.text.pretokenizers import PRE_TOKENIZERS
from hypocenter.model.text.tokenizer import load_tokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "glm4")
#: One input of so many is loaded and run: an engine takes a hundred times as long as a reader.
RUN_EVERY = 50
#: Numbers by which no model of ARCHITECTURES has a lie before one is planted.
SOUND_SEED = 1
WIDTH, FFN_WIDTH, NUM_TOKENS = 20, 22, 280
NUMBERS = (
    0, 1, 2, 3, 7, 31, 32, 33, 255, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
    2**40, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
FLOATS = (0.0, -0.0, 1e-45, 1e-5, 1.0, 3.4e38, float("inf"), float("-inf"), float("nan"))
TEXTS: tuple[str | bytes, ...] = (
    "", "x", "\x1b]0;title\x07\x1b[2J", "\u202e\u2028\x9b\xa0\x7f", "a\nb\r\n# forged",
    b"\xff\xfe\x00", b"\xed\xa0\x80", "é漢🙂", "x" * 70_000, "../../etc/passwd", "%s{0}{{",
    "<0x41>", "<0x00>", "</s>", "▁", " ", "\x00", "<|im_start|>", "[" * 5000,
    "{% for i in range(9**9) %}", "(a+)+$",
)  # fmt: skip
TEXTS_TO_ENCODE = (
    "",
    "a",
    " ab  b\n",
    "é漢🙂\x00",
    "<s>a</s><0x41>",
    "ab" * 3000,
    "\U0001f600" * 99,
)

Field = tuple[str | bytes, Item]


def model(source: random.Random, name: str) -> tuple[list[Field], list[FileTensor]]:
    """A model of one layer of the architecture `name`, sound but for a lie of the vocabulary."""
    number, real = gf.U32, gf.F32
    keys = {
        "block_count": Item(number, 1),
        "context_length": Item(number, 64),
        "embedding_length": Item(number, WIDTH),
        "feed_forward_length": Item(number, FFN_WIDTH),
        "attention.head_count": Item(number, 2),
        "attention.head_count_kv": Item(number, 1),
        "attention.layer_norm_rms_epsilon": Item(real, 1e-5),
    }
    fields: list[Field] = [("general.architecture", Item(gf.STRING, name))]
    fields += [(f"{name}.{key}", item) for key, item in keys.items()]
    fields += tokenizer(source)
    kv_width = WIDTH // 2
    shapes = {
        "attn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH, kv_width),
        "attn_v": (WIDTH, kv_width), "attn_output": (WIDTH, WIDTH), "ffn_norm": (WIDTH,),
        "ffn_gate": (WIDTH, FFN_WIDTH), "ffn_up": (WIDTH, FFN_WIDTH),
        "ffn_down": (FFN_WIDTH, WIDTH),
    }  # fmt: skip
    if name in ("phi3", "glm4"):
        del shapes["ffn_gate"]
        shapes["ffn_up"] = (WIDTH, 2 * FFN_WIDTH)
    if name == "phi3":
        del shapes["attn_q"], shapes["attn_k"], shapes["attn_v"]
        shapes["attn_qkv"] = (WIDTH, 2 * WIDTH)
    if name in ("qwen3", "gemma3"):
        shapes |= {"attn_q_norm": (kv_width,), "attn_k_norm": (kv_width,)}
    if name in ("gemma2", "gemma3", "glm4"):
        shapes |= {"post_attention_norm": (WIDTH,), "post_ffw_norm": (WIDTH,)}
    named = {"token_embd.weight": (WIDTH, NUM_TOKENS), "output_norm.weight": (WIDTH,)}
    named |= {f"blk.0.{part}.weight": shape for part, shape in shapes.items()}
    return fields, [weights(source, part, shape) for part, shape in named.items()]


def weights(source: random.Random, name: str, dims: tuple[int, ...]) -> FileTensor:
    """F32 numbers, a few of them NaN, infinite or huge."""
    num = 1
    for dim in dims:
        num *= dim
    values = [source.uniform(-0.3, 0.3) for _ in range(num)]
    if source.random() < 0.05:
        values[source.randrange(num)] = source.choice(FLOATS)
    return FileTensor(name, dims, 0, struct.pack(f"<{num}f", *values))


def tokenizer(source: random.Random) -> list[Field]:
    """A vocabulary of either form: each byte, a few words, and at times a few lies."""
    words: list[str | bytes] = ["<unk>", "<s>", "</s>"]
    form = source.choice(("llama", "gpt2"))
    if form == "llama":
        words += [f"<0x{byte:02X}>" for byte in range(256)]
        words += ["▁", "a", "b", "ab", "▁a", "▁ab"]
    else:
        # The characters for bytes, as GPT-2 has them: those that can be seen stand for themselves.
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        words += [chr(byte) for byte in shown]
        words += [chr(256 + index) for index in range(256 - len(shown))]
        words += ["ab", "Ġa"]
    words += [f"w{number}" for number in range(NUM_TOKENS - len(words))]
    kinds = [2, 3, 3, *[6 if form == "llama" else 1] * 256, *[1] * (NUM_TOKENS - 259)]
    scores = [float(-index) for index in range(NUM_TOKENS)]
    if source.random() < 0.3:
        # A text that is there already is refused at once, so each of these is tried alone.
        at, way = source.randrange(NUM_TOKENS), source.randrange(4)
        if way == 0:
            words[at] = source.choice(TEXTS)
        elif way == 1:
            kinds[at] = source.choice((0, 1, 2, 3, 4, 5, 6, 9, -1))
        elif way == 2:
            scores[at] = source.choice(FLOATS)
        else:
            kinds = [source.choice((1, 3, 4, kind)) for kind in kinds]
    begin = "tokenizer.ggml."
    fields: list[Field] = [
        (f"{begin}model", Item(gf.STRING, form)),
        (f"{begin}tokens", array_of(gf.STRING, words)),
        (f"{begin}token_type", array_of(gf.I32, kinds)),
        (f"{begin}bos_token_id", Item(gf.U32, 1)),
        (f"{begin}eos_token_id", Item(gf.U32, 2)),
    ]
    if form == "llama":
        fields.append((f"{begin}scores", array_of(gf.F32, scores)))
    else:
        fields.append((f"{begin}pre", Item(gf.STRING, source.choice(list(PRE_TOKENIZERS)))))
        fields.append((f"{begin}merges", array_of(gf.STRING, ["a b", "Ġ a"])))
    if source.random() < 0.5:
        template = source.choice((*TEXTS, "{{ messages[0].content }}"))
        fields.append(("tokenizer.chat_template", Item(gf.STRING, template)))
    return fields


def spoil_field(source: random.Random, fields: list[Field]) -> None:
    """Drop, double, rename or replace one key."""
    at = source.randrange(len(fields))
    key, item = fields[at]
    way = source.random()
    if way < 0.15:
        del fields[at]
    elif way < 0.25:
        fields.append((source.choice((key, *TEXTS)), item))
    elif way < 0.6 and item.type in (gf.U32, gf.U64):
        fields[at] = (key, Item(gf.U64, source.choice(NUMBERS)))
    elif way < 0.7 and isinstance(item.values, list):
        fields[at] = (key, Item(gf.ARRAY, item.values[: source.randrange(9)], item.item_type))
    elif way < 0.8:
        fields[at] = (key, Item(gf.STRING, source.choice(TEXTS)))
    elif way < 0.9:
        fields[at] = (key, Item(gf.F32, source.choice(FLOATS)))
    else:
        fields[at] = (key, nested(source, source.randrange(6)))


def nested(source: random.Random, depth: int) -> Item:
    """An array of arrays of numbers or texts."""
    if depth == 0:
        kind = source.choice((gf.U8, gf.BOOL, gf.I64))
        return array_of(kind, [source.randrange(2) for _ in range(source.randrange(5))])
    return array_of(gf.ARRAY, [nested(source, depth - 1) for _ in range(source.randrange(3))])


def spoil_tensor(source: random.Random, tensors: list[FileTensor]) -> None:
    """Drop, double, rename, resize, retype or move one tensor; its bytes stay."""
    at = source.randrange(len(tensors))
    tensor = tensors[at]
    name, dims, kind, offset = tensor.name, tensor.dims, tensor.type, tensor.offset
    way = source.randrange(6)
    if way == 0:
        del tensors[at]
        return
    if way == 1:
        name = source.choice(["x" * 200, "\x1b[2J", *(other.name for other in tensors)])
    elif way == 2:
        dims = tuple(source.choice((*NUMBERS, *dims)) for _ in range(source.choice((0, 1, 2, 5))))
    elif way == 3:
        kind = source.choice((*range(45), 2**31))
    elif way == 4:
        offset = source.choice((*NUMBERS, 64, 4096))
    else:
        dims = dims[::-1]
    tensors[at] = FileTensor(name, dims, kind, tensor.payload(), offset)


def spoil_bytes(source: random.Random, writer: GGUFWriter, data: bytearray) -> None:
    """Overwrite one number that the writer laid down, or any byte, or cut the file off."""
    way = source.random()
    mark = source.choice(writer.marks)
    if way < 0.6 and mark.offset + mark.width <= len(data):
        value = source.choice(NUMBERS) % (1 << 8 * mark.width)
        data[mark.offset : mark.offset + mark.width] = value.to_bytes(mark.width, "little")
    elif way < 0.85:
        data[source.randrange(min(writer.header_bytes, len(data)))] = source.randrange(256)
    else:
        del data[source.randrange(len(data)) :]


def hostile_file(source: random.Random) -> bytes:
    """One whole file with one to four lies."""
    fields, tensors = model(source, source.choice(ARCHITECTURES))
    if source.random() < 0.1:
        fields += gf.every_value()[1:]
    writer = GGUFWriter(version=source.choice((2, 3, 3, 3)))
    num_bytes_spoilt = 0
    for _ in range(source.choice((1, 1, 1, 2, 4))):
        way = source.random()
        if way < 0.4 and fields:
            spoil_field(source, fields)
        elif way < 0.65 and tensors:
            spoil_tensor(source, tensors)
        else:
            num_bytes_spoilt += 1
    data = bytearray(writer.build(fields, tensors))
    for _ in range(num_bytes_spoilt):
        if data:
            spoil_bytes(source, writer, data)
    return bytes(data)


def prepare(seeds_folder: Path) -> Callable[[random.Random, Path], str]:
    """See that what the lies are planted in would run; nothing is kept between trials."""
    for name in ARCHITECTURES:
        path = seeds_folder / f"{name}.gguf"
        path.write_bytes(GGUFWriter().build(*model(random.Random(SOUND_SEED), name)))
        done = hypo_in_process("run", str(path), "-p", "a", "-n", "1")
        assert done.returncode == 0, done.stderr

    def trial(source: random.Random, folder: Path) -> str:
        path = folder / "a.gguf"
        try:
            with limited_time():
                refusal(path, hostile_file(source))
                TRIED.clear()
                encode_all(path)
        except TooSlow:
            return "the reader or its tokenizer takes too long"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        name = str(path)
        ways = ((), ("--json",), ("--check",), ("-c", str(source.choice(NUMBERS))))
        command = ("inspect", name, *source.choice(ways))
        if wrong := answer_problem(*command):
            return wrong
        if source.random() >= 1 / RUN_EVERY:
            return ""
        way = source.choice((("-p", "ab"), ("-p", ""), ("ab",)))
        return answer_problem("run", name, *way, "-n", "3", "-q", raw_stdout=True)

    return trial


def encode_all(path: Path) -> None:
    """Encode and decode with the file's tokenizer, if it has one."""
    try:
        with open_gguf(path) as file:
            words = load_tokenizer(file)
    except HypoError:
        return
    for text in TEXTS_TO_ENCODE:
        try:
            words.decode(words.encode(text, parse_special=True))
        except HypoError:
            continue


if __name__ == "__main__":
    run_trials("GGUF files", __doc__ or "", prepare)
