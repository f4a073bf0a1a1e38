"""The table of attacks on a server under load; what each sends is in the modules it names."""

from __future__ import annotations

from dataclasses import dataclass

#: A server with keys, of which the attacker has one or none, and one that asks for none.
KEYS, OPEN = "keys", "open"


@dataclass(frozen=True)
class Attack:
    """`client` is the function of each of `num` clients at once. `has_key`: it is one of ours."""

    name: str
    client: str
    num: int
    server: str = KEYS
    has_key: bool = True
    #: Each of its clients has a key of its own: no share by key helps the others.
    many_keys: bool = False

    @property
    def id(self) -> str:
        who = "open" if self.server == OPEN else "with a key" if self.has_key else "without a key"
        return f"{self.name}, {self.num} x, {'16 keys' if self.many_keys else who}"


def _table() -> tuple[Attack, ...]:
    with_key = [
        ("tiny chunks", "connections.tiny_chunks", 4),
        ("tiny chunks", "connections.tiny_chunks", 12),
        ("chunk extensions", "connections.chunk_extensions", 4),
        ("short extensions", "connections.short_extensions", 4),
        ("padded sizes", "connections.padded_sizes", 4),
        ("trailers", "connections.trailers", 4),
        ("bytes of a body", "connections.bytes_of_body", 8),
        ("slow bodies of 31 MiB", "connections.slow_bodies", 24),
        ("dripped bodies", "connections.dripped_bodies", 200),
        ("refused bodies", "connections.refused_bodies", 6),
        ("pipelines", "connections.pipelines", 6),
        ("unread pipelines", "connections.unread_pipelines", 8),
        ("pipelines of work", "connections.piped_work", 8),
        ("small requests", "connections.small_requests", 12),
        ("unread streams", "connections.unread_streams", 64),
        ("8 million empty lists", "bodies.empty_lists", 2),
        ("10^6 fields", "bodies.fields", 2),
        ("a field 4 million times", "bodies.same_key", 2),
        ("10^6 keys of a message", "bodies.keys_of_a_message", 2),
        ("10^6 keys to the template", "bodies.keys_to_template", 2),
        ("800,000 messages", "bodies.many_messages", 2),
        ("10^7 brackets", "bodies.nested", 2),
        ("10,000 lists 900 deep", "bodies.nested_in_bounds", 2),
        ("15 million ids", "bodies.token_ids", 2),
        ("500 prompts of 30,000 ids", "bodies.prompts_of_ids", 2),
        ("512 prompts of 60,000 letters", "bodies.prompts_of_text", 8),
        ("512 wide prompts", "bodies.wide_prompts", 8),
        ("10^6 digits", "bodies.digits", 4),
        ("3*10^7 digits", "bodies.digits_of_a_message", 2),
        ("5 million escapes", "bodies.escapes", 2),
        ("90,000 biases", "bodies.biases", 8),
        ("90,000 stops", "bodies.stops", 8),
        ("90,000 bad words", "bodies.bad_words", 8),
        ("500,000 stop ids", "bodies.token_lists", 8),
        ("8,000 tools", "bodies.tools", 8),
        ("60,000 blocks", "bodies.blocks", 8),
        ("60,000 blocks counted", "bodies.blocks_that_are_counted", 8),
        ("30,000 items", "bodies.items", 8),
        ("30,000 references", "bodies.references", 8),
        ("schemas of 4,200 names", "work.names_schemas", 8),
        ("schemas that are left", "work.left_schemas", 16),
        ("one slow schema", "work.same_slow_schema", 16),
        ("many forms", "work.forms", 8),
        ("ambiguous answers", "work.ambiguous_answers", 16),
        ("/tokenize of 12 MiB", "work.tokenize", 4),
        ("/tokenize with pieces", "work.tokenize_pieces", 4),
        ("/tokenize of one word", "work.tokenize_one_word", 8),
        ("/tokenize that is left", "work.left_tokenize", 8),
        ("/detokenize of 10^6 ids", "work.detokenize", 4),
        ("/apply-template of 8 MiB", "work.apply_template", 4),
        ("50,000 turns", "work.many_turns", 4),
        ("chats of 4 MiB", "work.long_chats", 4),
        ("words of 32,000 letters", "work.short_words", 16),
        ("400 short turns", "work.short_turns", 16),
        ("1,000 bad words", "work.short_bad_words", 16),
        ("prompts that are left", "work.left_prompts", 40),
        ("100 prompts, just too long", "work.prompts_just_too_long", 16),
        ("n 128, logprobs, echo", "work.all_choices", 16),
        ("400 prompts at once", "work.many_prompts", 4),
        ("a full queue", "work.full_queue", 16),
        ("long answers", "work.long_answers", 16),
        ("long prompts", "work.long_prompts", 16),
        ("answers that are left", "work.left_answers", 16),
        ("answers that are cancelled", "work.cancelled_answers", 16),
        ("200 biases, 60 words", "work.crowded_biases", 16),
        ("salts", "work.salted_beginnings", 16),
        ("questions of state", "work.questions", 12),
        ("variables of a template", "work.template_variables", 8),
    ]  # fmt: skip
    without_key = [
        ("tiny chunks", "connections.tiny_chunks", 1),
        ("tiny chunks", "connections.tiny_chunks", 4),
        ("tiny chunks", "connections.tiny_chunks", 12),
        ("tiny chunks to /health", "connections.tiny_chunks_to_health", 4),
        ("chunk extensions", "connections.chunk_extensions", 4),
        ("trailers", "connections.trailers", 4),
        ("bytes of a body", "connections.bytes_of_body", 8),
        ("bytes of headers", "connections.bytes_of_headers", 8),
        ("slow bodies of 31 MiB", "connections.slow_bodies", 24),
        ("expectations", "connections.expectations", 16),
        ("slow headers", "connections.slow_headers", 50),
        ("huge headers", "connections.huge_headers", 6),
        ("3,000 idle connections", "connections.idle", 60),
        ("4,200 idle connections", "connections.idle", 84),
        ("comings and goings", "connections.comings_and_goings", 16),
        ("no requests", "connections.no_requests", 16),
        ("/health in pipelines", "connections.pipelines", 6),
        ("/tokenize of 12 MiB", "work.tokenize", 4),
        ("15 million ids", "bodies.token_ids", 2),
    ]
    on_open = [
        ("tiny chunks", "connections.tiny_chunks", 12),
        ("slow bodies of 31 MiB", "connections.slow_bodies", 24),
        ("8 million empty lists", "bodies.empty_lists", 2),
        ("schemas of 4,200 names", "work.names_schemas", 8),
        ("/tokenize of 12 MiB", "work.tokenize", 4),
        ("prompts that are left", "work.left_prompts", 40),
        ("n 128, logprobs, echo", "work.all_choices", 16),
        ("a full queue", "work.full_queue", 16),
        ("long answers", "work.long_answers", 16),
    ]
    return (
        *(Attack(*one) for one in with_key),
        Attack("slow bodies of 31 MiB", "connections.slow_bodies", 24, many_keys=True),
        Attack("long answers", "work.long_answers", 16, many_keys=True),
        *(Attack(*one, has_key=False) for one in without_key),
        *(Attack(*one, server=OPEN) for one in on_open),
    )


ATTACKS = _table()
