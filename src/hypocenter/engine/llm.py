"""LLM: a model file and an engine behind a handful of methods; no scheduling, no global state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self, Unpack, cast, overload

import numpy as np
import numpy.typing as npt

from hypocenter.base.dtypes import Float32s
from hypocenter.base.errors import BadSetting, UsageError
from hypocenter.base.results import Completion, Delta, Route
from hypocenter.conversation.call_formats import text_parameters
from hypocenter.conversation.tools import Tools, check_tools
from hypocenter.engine.admission import RequestTerms
from hypocenter.engine.arguments import (
    ChatFields,
    Conversation,
    Prompt,
    is_one_conversation,
    is_one_prompt,
    noting_place,
    params_of_each,
    require,
    split_chat_fields,
    with_fields,
)
from hypocenter.engine.conversations import (
    ANY_ANSWER,
    AnswerRules,
    Conversations,
    PromptReader,
    field_of,
    in_thought,
)
from hypocenter.engine.drafting.loading import load_draft_model
from hypocenter.engine.engine import Engine
from hypocenter.engine.request import Request
from hypocenter.engine.runner import loaded_runner
from hypocenter.engine.step_trace import StepTrace
from hypocenter.engine.text_head import vector_of
from hypocenter.model.facts.layer_shapes import lost_window
from hypocenter.model.facts.pooling import Pooling
from hypocenter.model.from_name import file_of
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.gguf.identity import require_model
from hypocenter.model.text.chat import ChatTemplate
from hypocenter.model.text.tokenizer import Tokenizer
from hypocenter.record.recorder import recording_defects
from hypocenter.settings.config import (
    MAX_SEED,
    EngineConfig,
    EngineFields,
    SamplingFields,
    SamplingParams,
)
from hypocenter.settings.environment import as_environment_asks
from hypocenter.settings.synonyms import explain_unknown
from hypocenter.trace.points import Selection
from hypocenter.trace.writing import TraceFile
from hypocenter.wire.messages import KeptWeights

log = logging.getLogger("hypocenter.engine")

#: Answers to one prompt in one call.
MAX_SAMPLES = 4096


def read_prompts(path: Path, config: EngineConfig) -> PromptReader:
    """What an LLM reads of a model besides its weights. Raises as it does."""
    with open_gguf(path, config.override_kv) as file:
        require_model(file)
        return PromptReader(file, config)


class LLM:
    """A language model that generates, chats and shows its logits.

        with LLM("model.gguf", context_length=4096) as llm:
            print(llm.generate("def read_lines(path):", max_tokens=64).text)

    `path` may also be a model of a hub, `"OWNER/NAME:Q4_K_M"`, which is fetched once. None takes
    the small model that comes with hypocenter. `fields` are those of
    EngineConfig, over those of `config`. `progress` is called with what is being done and how much
    of it is done, from 0 to 1. `shared` are weights that another process has on the device
    (`worker/keeper.py`), `block_memory` is where blocks of the KV cache outlive this process
    (`engine/block_archive.py`), `prompts` what was read of the file before. Raises BadModelFile,
    UnsupportedModel or UsageError when the file cannot be run as that asks.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        progress: Callable[[str, float], None] | None = None,
        shared: KeptWeights | None = None,
        block_memory: str = "",
        prompts: PromptReader | None = None,
        **fields: Unpack[EngineFields],
    ) -> None:
        config = as_environment_asks(with_fields("config", config, EngineConfig, fields))
        if path is not None:
            require("path", path, "a text or a Path", str, Path)
        if progress is not None and not callable(progress):
            raise UsageError(f"progress is {progress!r}, but must be a function of two arguments")
        with ExitStack() as stack, recording_defects():
            found = (
                path
                if isinstance(path, Path) or path == ""
                else file_of(path, device=config.device, progress=progress)
            )
            file = stack.enter_context(open_gguf(Path(found), config.override_kv))
            require_model(file)
            self._path = file.path
            if prompts is None or prompts.stamps != file.stamps:
                prompts = PromptReader(file, config)
            self._prompts = stack.enter_context(prompts)
            runner = stack.enter_context(
                loaded_runner(file, config, progress, shared, block_memory)
            )
            if lost := lost_window(file, runner.arch.name, runner.context_length):
                log.warning("%s", lost)
            file.require_overrides_read()
            self._engine = Engine(
                runner,
                self.tokenizer,
                file.path,
                launch_mode=config.launch_mode,
                prefix_cache=config.prefix_cache,
                draft_model=load_draft_model(file, runner, config, progress),
            )
            stack.callback(self._engine.close)
            self._resources = stack.pop_all()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._prompts.tokenizer

    @property
    def conversations(self) -> Conversations:
        """What turns messages into a prompt, and tells what an answer says."""
        return self._prompts.conversations

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The template that came with the model, or None."""
        return self._prompts.chat_template

    @property
    def context_length(self) -> int:
        """The most tokens that prompt and output may have together."""
        return self._engine.runner.context_length

    @property
    def vocab_size(self) -> int:
        """How many logits there are for a token."""
        return self._engine.runner.vocab_size

    @property
    def engine(self) -> Engine:
        """The engine, for callers that submit and drive requests themselves."""
        return self._engine

    def route(self) -> Route:
        """What the model really runs on, read from inside."""
        return self._engine.route()

    # A str is a Sequence[str] to the type checker; the first overload decides.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: str,
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion | list[Completion]:
        """Continue a text or token ids; of a sequence of these, all together and in order.

        `params` are for all prompts, or one for each; `fields` are those of SamplingParams, over
        those of `params`. A text is encoded with the model's BOS, token ids are taken as they are.
        Nothing runs when one of the prompts is refused: ContextOverflow for one longer than the
        context, UsageError for one without tokens or of a wrong type. Raises the error of the first
        request that failed.
        """
        completions = self._engine.complete(self.requests(prompt, params, **fields))
        return completions[0] if is_one_prompt(prompt) else completions

    def sample(
        self,
        prompt: Prompt,
        num_samples: int,
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]:
        """Several answers to one prompt, all together; `temperature` 0 would make them the same.

        Without a seed each has one of its own; with one they have it and those that follow it.
        Raises what `generate` raises.
        """
        return self._engine.complete(self.sample_requests(prompt, num_samples, params, **fields))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Generator[Delta, None, Completion]:
        """Like `generate` for one prompt, piece by piece; the generator returns the Completion.

        The prompt is checked at once, and runs when the first piece is asked for. Closing the
        generator cancels the request.
        """
        return self._engine.follow(self.request(prompt, params, **fields))

    # A Mapping is no Sequence to the type checker, so the two do not overlap.
    @overload
    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        **fields: Unpack[ChatFields],
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Unpack[ChatFields],
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Unpack[ChatFields],
    ) -> Completion | list[Completion]:
        """Answer a conversation: messages with "role" and "content"; or several, all together.

        A content is a text, or parts of text as in OpenAI's API. `params` are as in `generate`.
        What the model thinks is in the Completion's `reasoning`, and not in its `text`.
        `chat_template_kwargs` are variables of the template, over those of the configuration.
        `tools` are offered to the model, as OpenAI's API describes them; those that it calls are in
        the Completion's `tool_calls`, and calling them is up to you. `tool_choice` is OpenAI's as
        well: "auto", "none", "required", or a mapping that names a function.
        With `continue_final_message` the answer goes on with the last message, the assistant's.
        Raises UsageError for a model without chat template, TemplateError when the template
        refuses the messages, and what `generate` raises.
        """
        requests = self.chat_requests(messages, params, **fields)
        completions = self._engine.complete(requests)
        return completions[0] if is_one_conversation(messages) else completions

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        **fields: Unpack[ChatFields],
    ) -> Generator[Delta, None, Completion]:
        """Like `chat` for one conversation, piece by piece as in `stream`."""
        return self._engine.follow(self.chat_request(messages, params, **fields))

    def trace(
        self, path: str | Path, selection: Selection | None = None, *, max_data_bytes: int = 0
    ) -> StepTrace:
        """Write a trace (docs/traces.md) of all steps from now on to a new file.

        `max_data_bytes`: of the tensors themselves so many bytes are kept. Raises UsageError.
        """
        runner, path = self._engine.runner, Path(path)
        num_layers, layers = runner.arch.num_layers, (selection or Selection()).layers or ()
        if (last := max(layers, default=0)) >= num_layers:
            raise UsageError(f"there is no layer {last} to trace: {num_layers} layers, 0 the first")
        file = TraceFile(path, runner.trace_header(self._path, max_data_bytes))
        return runner.begin_trace(file, selection or Selection(), max_data_bytes)

    def logits(self, prompt: Prompt) -> npt.NDArray[np.float32]:
        """The logits after each token of the prompt, f32 [num_tokens, vocab_size].

        Mind the size: 4096 tokens of a vocabulary of 128256 are 2 GiB.
        """
        request = self._engine.request(
            self.encode(prompt), SamplingParams(max_tokens=0), RequestTerms(keeps_logits=True)
        )
        self._engine.complete([request])
        return np.concatenate(request.logits)

    @overload
    def embed(  # type: ignore[overload-overlap]
        self, texts: str, *, dimensions: int | None = None, normalise: bool = True
    ) -> Float32s: ...
    @overload
    def embed(
        self, texts: Sequence[int], *, dimensions: int | None = None, normalise: bool = True
    ) -> Float32s: ...
    @overload
    def embed(
        self, texts: Sequence[Prompt], *, dimensions: int | None = None, normalise: bool = True
    ) -> list[Float32s]: ...

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalise: bool = True,
    ) -> Float32s | list[Float32s]:
        """The vector of a text or of token ids, f32 [embedding_size]; of several, all together and
        in order. Without pooling it is f32 [num_tokens, embedding_size].

        `dimensions` keeps the first so many numbers, which models that were trained for it allow;
        `normalise` divides each vector by its length. Raises UsageError for a model that gives no
        vectors, and what `generate` raises for a prompt.
        """
        require("normalise", normalise, "True or False", bool)
        self.embedding_size_for(dimensions)
        is_one = is_one_prompt(texts)
        prompts = [cast(Prompt, texts)] if is_one else cast("Sequence[Prompt]", texts)
        requests = []
        for place, prompt in enumerate(prompts):
            with noting_place("text", place, len(prompts)):
                requests.append(self.text_request(self.encode(prompt)))
        self._engine.complete(requests)
        vectors = [vector_of(request, dimensions, normalise=normalise) for request in requests]
        return vectors[0] if is_one else vectors

    def rerank(self, query: str, documents: Sequence[str]) -> list[float]:
        """How well each document answers the query, by the model's own scale: the more the better.

        Raises UsageError for a model that gives no scores, and what `generate` raises for a prompt.
        """
        require("query", query, "a text", str)
        self.require_scores()
        requests = []
        for place, document in enumerate(documents):
            with noting_place("document", place, len(documents)):
                require("document", document, "a text", str)
                requests.append(self.text_request(*self.encode_pair(query, document)))
        self._engine.complete(requests)
        return [float(vector_of(request, normalise=False)[0]) for request in requests]

    def encode_pair(self, query: str, document: str) -> tuple[Sequence[int], int | None]:
        """The token ids that `rerank` runs for a document, and how many of them are the query's;
        None where the model makes no difference. Raises UsageError for a model without pairs."""
        return self._prompts.encode_pair(query, document)

    def text_request(self, ids: Sequence[int], num_first: int | None = None) -> Request:
        """A checked request for the vector of a text, or the score of a pair whose first so many
        tokens are the query."""
        terms = RequestTerms(embeds=True, num_first=num_first)
        with recording_defects():
            return self._engine.request(ids, SamplingParams(max_tokens=0), terms)

    @property
    def pooling(self) -> Pooling | None:
        """How vectors or scores come of texts; None: the model writes."""
        return self._engine.runner.arch.pooling

    def embedding_size_for(self, dimensions: int | None) -> int:
        """How long vectors are of which so many numbers are kept (None: all). Raises BadSetting,
        and UsageError for a model that gives scores."""
        size = self._engine.runner.text_head.num_columns
        if self.pooling is not None and self.pooling.scores:
            raise UsageError(
                f"{self._path} gives scores of documents and no vectors; rank documents with it"
            )
        if dimensions is None:
            return size
        require("dimensions", dimensions, "a whole number", int)
        if not 1 <= dimensions <= size:
            raise BadSetting("dimensions", dimensions, f"must be from 1 to {size}")
        return dimensions

    def require_scores(self) -> None:
        """Raises UsageError for a model that gives none."""
        if self.pooling is None or not self.pooling.scores:
            raise UsageError(
                f"{self._path} has no head that scores a document; take a reranking model"
            )

    def encode_chat(
        self,
        messages: Conversation,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The token ids of a conversation, up to where the answer begins.

        That is the end of the last message where the answer is to continue it; without
        `add_generation_prompt` nothing says that the assistant's turn begins.
        Control tokens are recognised in the template's own text only, never in what the messages
        say; so nobody can end his turn by writing the token that ends it.
        """
        self._engine.require_usable()  # or a template's own process would be asked, or begun
        return self.conversations.encode(
            messages,
            chat_template_kwargs,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Request:
        """A checked request, for callers that submit it to `engine` or to a Driver themselves."""
        given = with_fields("params", params, SamplingParams, fields)
        with recording_defects():
            return self._engine.request(self.encode(prompt), given)

    def requests(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[Request]:
        """The checked requests of `generate`, as `request` gives one."""
        is_one = is_one_prompt(prompt)
        prompts = [cast(Prompt, prompt)] if is_one else cast("Sequence[Prompt]", prompt)
        each = params_of_each(params, len(prompts), is_one=is_one)
        requests = []
        for place, (one_prompt, given) in enumerate(zip(prompts, each, strict=True)):
            with noting_place("prompt", place, len(prompts)):
                requests.append(self.request(one_prompt, given, **fields))
        return requests

    def sample_requests(
        self,
        prompt: Prompt,
        num_samples: int,
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[Request]:
        """The checked requests of `sample`."""
        require("num_samples", num_samples, "a whole number", int, np.integer)
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise BadSetting("num_samples", num_samples, f"must be from 1 to {MAX_SAMPLES}")
        given = with_fields("params", params, SamplingParams, fields)
        seeds = [
            None if given.seed is None else (given.seed + number) % (MAX_SEED + 1)
            for number in range(num_samples)
        ]
        ids = self.encode(prompt)
        return [self.request(ids, replace(given, seed=seed)) for seed in seeds]

    def chat_requests(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Unpack[ChatFields],
    ) -> list[Request]:
        """The checked requests of `chat`."""
        is_one = is_one_conversation(messages)
        conversations = cast("Sequence[Conversation]", [messages] if is_one else messages)
        each = params_of_each(params, len(conversations), is_one=is_one)
        requests = []
        for place, (conversation, given) in enumerate(zip(conversations, each, strict=True)):
            with noting_place("conversation", place, len(conversations)):
                requests.append(self.chat_request(conversation, given, **fields))
        return requests

    def chat_request(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        **fields: Unpack[ChatFields],
    ) -> Request:
        """The checked request of `chat` for one conversation."""
        options, sampling = split_chat_fields(fields)
        given = with_fields("params", params, SamplingParams, sampling)
        with recording_defects():
            continues = options.continue_final_message
            ids = self.encode_chat(
                messages,
                options.chat_template_kwargs,
                options.tools,
                continue_final_message=continues,
            )
            part = self.conversations.continued_part(messages) if continues else ""
            answer = AnswerRules(options.tools, options.calls(), part)
            return self.answer_request(ids, given, answer)

    def answer_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        answer: AnswerRules = ANY_ANSWER,
        *,
        output_ids: Sequence[int] = (),
    ) -> Request:
        """A checked request for the answer to a conversation's token ids, as `answer` may be.

        With `output_ids` it goes on behind these.

        Raises what `Engine.request` raises, and UsageError for calls that cannot be held to a form.
        """
        conversations = self.conversations
        terms = RequestTerms(
            output_ids=output_ids,
            reader=conversations.reader(
                prompt_ids,
                params,
                offers_tools=bool(answer.tools),
                in_thought=in_thought(answer.continues),
                types=text_parameters(check_tools(answer.tools)),
                must_call=answer.calls.must_call,
            ),
            call_form=conversations.call_form(prompt_ids, field_of(params), answer),
            turn_ids=conversations.turn_ids,
        )
        return self._engine.request(prompt_ids, params, terms)

    def close(self) -> None:
        """Give everything back; requests that still run end with an error. May be called twice.

        In the child of a fork it does nothing: the model is the parent's.
        """
        if self._engine.is_of_this_process:
            self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        route = self.route()
        return f"LLM({str(self._path)!r}, device={route.device!r}, {self.context_length} positions)"

    def __reduce__(self) -> NoReturn:
        raise UsageError("an LLM cannot be copied or pickled; open its file in each process")

    if not TYPE_CHECKING:  # or no unknown name would be found by a type checker

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):  # others ask for these, to see what an object can do
                raise AttributeError(f"LLM has no {name!r}")
            members = [member for member in dir(type(self)) if not member.startswith("_")]
            raise AttributeError(explain_unknown("LLM", name, members))

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """The token ids that `generate` runs: of a text with the model's BOS, ids as they are.

        Raises UsageError for a text that has no tokens.
        """
        return self._prompts.encode(prompt)
