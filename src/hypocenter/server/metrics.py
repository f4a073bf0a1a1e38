"""What is counted, under vLLM's names where it has one, for the dashboards that know those.

Names, labels, units and what is a sample: https://docs.vllm.ai/en/latest/usage/metrics/ and
vllm/v1/metrics/loggers.py. What only we have begins with `hypocenter:`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hypocenter.server.generation import Generation, WorkerEvent
from hypocenter.server.supervisor import Supervisor
from hypocenter.wire.messages import Failed, Piece

_TO_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5,
             10, 20, 40, 80, 160, 640, 2560)  # fmt: skip
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
            40, 80)  # fmt: skip
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
#: vLLM numbers its engines; there is one here.
_ENGINE = "0"


class Metrics:
    """The counters of one server; `text` is what `/metrics` answers.

    `note` is the `watcher` of each generation. Figures of a choice are counted as they come, so a
    rate of tokens is one; what vLLM counts for a request is counted for each choice, as there.
    """

    def __init__(
        self, supervisor: Supervisor, model: str, num_lost_lines: Callable[[], int]
    ) -> None:
        # Each figure would have another one beside it that says when it was made.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        registry.register(_Gauges(supervisor, model, num_lost_lines))
        own = {"model_name": model}
        of_vllm = {**own, "engine": _ENGINE}

        def counter(name: str, what: str) -> Counter:
            labels = of_vllm if name.startswith("vllm:") else own
            return Counter(name, what, list(labels), registry=registry).labels(**labels)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, what, list(of_vllm), buckets=buckets, registry=registry)
            return made.labels(**of_vllm)

        self._prompt = counter(
            "vllm:prompt_tokens", "Prompt tokens of all requests whose first token has come."
        )
        self._generated = counter("vllm:generation_tokens", "Tokens generated for all requests.")
        self._queries = counter(
            "vllm:prefix_cache_queries", "Prompt tokens that were looked for in the prefix cache."
        )
        self._hits = counter(
            "vllm:prefix_cache_hits", "Prompt tokens that were found in the prefix cache."
        )
        self._preempted = counter(
            "vllm:num_preemptions", "Times that a running request gave its KV cache up for others."
        )
        success = Counter(
            "vllm:request_success",
            "Requests that ended, by how: stop, length, abort (cancelled) or error.",
            [*of_vllm, "finished_reason"],
            registry=registry,
        )
        self._success = {
            reason: success.labels(**of_vllm, finished_reason=reason)
            for reason in ("stop", "length", "abort", "error")
        }
        self._first = histogram(
            "vllm:time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            _TO_FIRST,
        )
        self._between = histogram(
            "vllm:inter_token_latency_seconds",
            "Seconds between two pieces of an answer; each gap is a sample.",
            _BETWEEN,
        )
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean seconds of each token after the first one; each request is a sample.",
            _BETWEEN,
        )
        self._whole = histogram(
            "vllm:e2e_request_latency_seconds",
            "Seconds from a request's arrival to its last token.",
            _WHOLE,
        )
        self._prompt_sizes = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request that ended.", _TOKENS
        )
        self._sizes = histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request that ended.", _TOKENS
        )
        self._events = {
            what: counter(f"hypocenter:{name}", text)
            for what, name, text in (
                ("fault", "faults", "Workers that died of a fault."),
                ("restarted", "worker_restarts", "Workers started in place of another."),
                ("resumed", "requests_resumed", "Times that a request outlived its worker."),
                ("paused", "requests_paused", "Times that a request gave way to another client."),
                ("quarantined", "quarantined_requests", "Requests given up after three workers."),
                ("canary_changed", "canary_changed", "Canaries whose tokens were not the first."),
                ("bundle", "crash_bundles", "Bundles of faults that were saved."),
                ("refused", "requests_refused", "Requests refused because too many were open."),
                ("cancelled", "requests_cancelled", "Requests whose clients left."),
            )
        }

    def count(self, what: str) -> None:
        """Something happened that has no figure besides itself."""
        self._events[what].inc()

    def note(self, generation: Generation, event: WorkerEvent) -> None:
        """A worker has said something of a generation, which knows of it already."""
        match event:
            case Piece():
                self._note_piece(generation, event)
            case Failed() if generation.prompt_ids is not None:  # else it was refused
                self._success["error"].inc()

    def count_aborted(self, number: int) -> None:
        """Generations that nobody waits for any more."""
        self._success["abort"].inc(number)

    def text(self) -> bytes:
        """In the format that Prometheus reads."""
        return generate_latest(self._registry)

    def _note_piece(self, generation: Generation, piece: Piece) -> None:
        first, last = generation.first_token, generation.last_token
        if piece.token_ids:
            assert first is not None, "it has noted the piece"
            if generation.gap is None:
                self._prompt.inc(len(generation.prompt_ids or ()))
                self._first.observe(first - generation.submitted)
            else:
                self._between.observe(generation.gap)
            self._generated.inc(len(piece.token_ids))
        if piece.ending is None:
            return
        num_prompt, num_out = len(generation.prompt_ids or ()), len(generation.output_ids)
        if first is None:  # it was asked for no token
            self._prompt.inc(num_prompt)
        reason = piece.ending.reason
        self._success[reason if reason in self._success else "abort"].inc()
        self._queries.inc(num_prompt)
        self._hits.inc(piece.ending.num_cached_tokens)
        self._preempted.inc(piece.ending.num_preemptions)
        self._prompt_sizes.observe(num_prompt)
        self._sizes.observe(num_out)
        self._whole.observe(time.monotonic() - generation.submitted)
        if first is not None and last is not None and num_out > 1:
            self._per_token.observe((last - first) / (num_out - 1))


class _Gauges:
    """What is so at the moment that somebody asks."""

    def __init__(
        self, supervisor: Supervisor, model: str, num_lost_lines: Callable[[], int]
    ) -> None:
        self._supervisor, self._model = supervisor, model
        self._num_lost_lines = num_lost_lines

    def collect(self) -> Iterable[Metric]:
        state, facts = self._supervisor.state, self._supervisor.facts
        num_open = len(self._supervisor.generations)
        used = 0.0
        if facts is not None and state.num_running:
            used = 1 - state.num_free_blocks / facts.num_blocks
        values = {
            "vllm:num_requests_running": (
                "Requests that the model computes now.",
                state.num_running,
            ),
            "vllm:num_requests_waiting": (
                "Requests that wait to be computed.",
                max(num_open - state.num_running, 0),
            ),
            "vllm:kv_cache_usage_perc": (
                "Share of the KV cache that running requests use, from 0 to 1.",
                used,
            ),
            "hypocenter:worker_ready": (
                "1 while a worker takes requests, else 0.",
                int(self._supervisor.is_ready),
            ),
        }
        for name, (text, value) in values.items():
            labels = {"model_name": self._model}
            if name.startswith("vllm:"):
                labels["engine"] = _ENGINE
            family = GaugeMetricFamily(name, text, labels=list(labels))
            family.add_metric(list(labels.values()), value)
            yield family
        lost = CounterMetricFamily(
            "hypocenter:log_lines_lost",
            "Lines of the log that could not be written.",
            labels=["model_name"],
        )
        lost.add_metric([self._model], self._num_lost_lines())
        yield lost
        compiled = CounterMetricFamily(
            "hypocenter:compiled_after_ready",
            "Forms of kernels that the worker compiled, or loaded, after it was ready.",
            labels=["model_name"],
        )
        compiled.add_metric([self._model], state.num_compiled)
        yield compiled
        if facts is not None:
            info = {
                "model_name": self._model,
                "engine": _ENGINE,
                "block_size": str(facts.block_size),
                "num_gpu_blocks": str(facts.num_blocks),
            }
            config = GaugeMetricFamily(
                "vllm:cache_config_info",
                "Always 1; its labels say how large the KV cache is.",
                labels=list(info),
            )
            config.add_metric(list(info.values()), 1)
            yield config
