"""What is counted, under vLLM's names where it has one, for the dashboards that know those.

Names, labels, units and what is a sample: https://docs.vllm.ai/en/latest/usage/metrics/ and
vllm/v1/metrics/loggers.py. What only we have begins with `hypocenter:`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hypocenter.server.fleet.replica import Replica
from hypocenter.server.generation import Generation, WorkerEvent
from hypocenter.server.supervisor import Supervisor
from hypocenter.wire.messages import Ending, Failed, Piece

_TO_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5,
             10, 20, 40, 80, 160, 640, 2560)  # fmt: skip
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
            40, 80)  # fmt: skip
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
#: What is counted of each replica, which vLLM calls an engine: attribute, name, text, buckets.
_COUNTERS = (
    ("prompt", "vllm:prompt_tokens", "Prompt tokens of all requests whose first token has come."),
    ("generated", "vllm:generation_tokens", "Tokens generated for all requests."),
    (
        "queries",
        "vllm:prefix_cache_queries",
        "Prompt tokens that were looked for in the prefix cache.",
    ),
    ("hits", "vllm:prefix_cache_hits", "Prompt tokens that were found in the prefix cache."),
    (
        "preempted",
        "vllm:num_preemptions",
        "Times that a running request gave its KV cache up for others.",
    ),
    ("drafts", "vllm:spec_decode_num_drafts", "Steps of ended requests that tried tokens."),
    ("drafted", "vllm:spec_decode_num_draft_tokens", "Tokens that were tried in these."),
    (
        "accepted",
        "vllm:spec_decode_num_accepted_tokens",
        "Those of them that were chosen as well.",
    ),
)
_HISTOGRAMS = (
    (
        "first",
        "vllm:time_to_first_token_seconds",
        "Seconds from a request's arrival to its first token.",
        _TO_FIRST,
    ),
    (
        "between",
        "vllm:inter_token_latency_seconds",
        "Seconds between two pieces of an answer; each gap is a sample.",
        _BETWEEN,
    ),
    (
        "per_token",
        "vllm:request_time_per_output_token_seconds",
        "Mean seconds of each token after the first one; each request is a sample.",
        _BETWEEN,
    ),
    (
        "whole",
        "vllm:e2e_request_latency_seconds",
        "Seconds from a request's arrival to its last token.",
        _WHOLE,
    ),
    (
        "prompt_sizes",
        "vllm:request_prompt_tokens",
        "Prompt tokens of a request that ended.",
        _TOKENS,
    ),
    (
        "sizes",
        "vllm:request_generation_tokens",
        "Tokens generated for a request that ended.",
        _TOKENS,
    ),
)
#: Events by replica, and those that are the server's.
_EVENTS = (
    ("fault", "faults", "Workers that died of a fault."),
    ("restarted", "worker_restarts", "Workers started in place of another."),
    ("resumed", "requests_resumed", "Times that a request outlived its worker."),
    ("paused", "requests_paused", "Times that a request gave way to another client."),
    ("quarantined", "quarantined_requests", "Requests given up after three workers."),
)
_OWN_EVENTS = (
    ("loaded", "model_loads", "Times that a model was loaded on demand, or because it is pinned."),
    ("unloaded", "model_unloads", "Times that a model was unloaded."),
    ("load_failed", "model_load_failures", "Times that a model could not be loaded."),
    ("bundle", "crash_bundles", "Bundles of faults that were saved."),
    ("refused", "requests_refused", "Requests refused because too many were open."),
    ("cancelled", "requests_cancelled", "Requests whose clients left."),
    ("canary_changed", "canary_changed", "Canaries whose tokens were not the first."),
)


class _Figures:
    """The counters of one replica, by the attributes of the tables above."""

    def __init__(self, families: dict[str, Any], labels: dict[str, str]) -> None:
        self._families, self._labels = families, labels
        self.prompt, self.generated = self._of("prompt"), self._of("generated")
        self.queries, self.hits = self._of("queries"), self._of("hits")
        self.preempted = self._of("preempted")
        self.drafts, self.drafted = self._of("drafts"), self._of("drafted")
        self.accepted, self._accepted_at = self._of("accepted"), families["accepted_at"]
        self.first, self.between = self._of("first"), self._of("between")
        self.per_token, self.whole = self._of("per_token"), self._of("whole")
        self.prompt_sizes, self.sizes = self._of("prompt_sizes"), self._of("sizes")
        success = families["success"]
        self.success = {
            reason: success.labels(**labels, finished_reason=reason)
            for reason in ("stop", "length", "abort", "error")
        }
        self.events = {what: self._of(what) for what, _, _ in _EVENTS}

    def _of(self, attribute: str) -> Any:
        return self._families[attribute].labels(**self._labels)

    def count_drafts(self, ending: Ending) -> None:
        """What a request tried that has ended, if it did."""
        self.drafts.inc(ending.num_drafts)
        self.drafted.inc(ending.num_drafted)
        self.accepted.inc(sum(ending.accepted_at))
        for place, number in enumerate(ending.accepted_at):
            self._accepted_at.labels(**self._labels, position=place).inc(number)


class _Families:
    """What is counted of each model: every figure once, with the model as a label."""

    def __init__(self) -> None:
        # Each figure would have another one beside it that says when it was made.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        labels = ["model_name", "engine"]
        self.of_replicas: dict[str, Any] = {
            attribute: Counter(name, text, labels, registry=registry)
            for attribute, name, text in _COUNTERS
        }
        self.of_replicas["success"] = Counter(
            "vllm:request_success",
            "Requests that ended, by how: stop, length, abort (cancelled) or error.",
            [*labels, "finished_reason"],
            registry=registry,
        )
        self.of_replicas["accepted_at"] = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Those of them by their place in what was tried, from 0 on.",
            [*labels, "position"],
            registry=registry,
        )
        for attribute, name, text, buckets in _HISTOGRAMS:
            figure = Histogram(name, text, labels, buckets=buckets, registry=registry)
            self.of_replicas[attribute] = figure
        for what, name, text in _EVENTS:
            self.of_replicas[what] = Counter(f"hypocenter:{name}", text, labels, registry=registry)
        self.of_models = {
            what: Counter(f"hypocenter:{name}", text, ["model_name"], registry=registry)
            for what, name, text in _OWN_EVENTS
        }


class Metrics:
    """The counters of one model; `text` is what `/metrics` answers, with those of all models.

    `note` is the `watcher` of each generation. Figures of a choice are counted as they come, so a
    rate of tokens is one; what vLLM counts for a request is counted for each choice, as there.
    `beside`: those of another model of the same server.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        model: str,
        num_lost_lines: Callable[[], int],
        beside: Metrics | None = None,
    ) -> None:
        self._model = model
        families = _Families() if beside is None else beside._families
        self._families: _Families = families
        if beside is None:
            self._gauges = _Gauges(model, num_lost_lines)
            families.registry.register(self._gauges)
        else:
            self._gauges = beside._gauges
        self.follow(supervisor)
        self._replicas = [
            _Figures(families.of_replicas, {"model_name": model, "engine": str(replica.number)})
            for replica in supervisor.replicas
        ]
        self._own_events = {
            what: counter.labels(model_name=model) for what, counter in families.of_models.items()
        }

    def follow(self, supervisor: Supervisor) -> None:
        """From now on this one has the model's workers."""
        self._gauges.supervisors[self._model] = supervisor

    def count(self, what: str, replica: int | None = None) -> None:
        """Something happened that has no figure besides itself, on a replica or to the server."""
        events = self._own_events if replica is None else self._replicas[replica].events
        events[what].inc()

    def note(self, generation: Generation, event: WorkerEvent) -> None:
        """A worker has said something of a generation, which knows of it already."""
        match event:
            case Piece():
                self._note_piece(generation, event)
            case Failed() if generation.prompt_ids is not None:  # else it was refused
                self._of(generation).success["error"].inc()

    def count_aborted(self, generations: Iterable[Generation]) -> None:
        """Generations that nobody waits for any more."""
        for generation in generations:
            self._of(generation).success["abort"].inc()

    def text(self) -> bytes:
        """In the format that Prometheus reads."""
        return generate_latest(self._families.registry)

    def _of(self, generation: Generation) -> _Figures:
        """Those of the replica that has it; of the first one, where none has it yet."""
        return self._replicas[generation.replica or 0]

    def _note_piece(self, generation: Generation, piece: Piece) -> None:
        figures = self._of(generation)
        first, last = generation.first_token, generation.last_token
        if piece.token_ids:
            assert first is not None, "it has noted the piece"
            if generation.gap is None:
                figures.prompt.inc(len(generation.prompt_ids or ()))
                figures.first.observe(first - generation.submitted)
            else:
                figures.between.observe(generation.gap)
            figures.generated.inc(len(piece.token_ids))
        if piece.ending is None:
            return
        num_prompt, num_out = len(generation.prompt_ids or ()), len(generation.output_ids)
        if first is None:  # it was asked for no token
            figures.prompt.inc(num_prompt)
        reason = piece.ending.reason
        figures.success[reason if reason in figures.success else "abort"].inc()
        figures.queries.inc(num_prompt)
        figures.hits.inc(piece.ending.num_cached_tokens)
        figures.preempted.inc(piece.ending.num_preemptions)
        figures.count_drafts(piece.ending)
        figures.prompt_sizes.observe(num_prompt)
        figures.sizes.observe(num_out)
        figures.whole.observe(time.monotonic() - generation.submitted)
        if first is not None and last is not None and num_out > 1:
            figures.per_token.observe((last - first) / (num_out - 1))


class _Gauges:
    """What is so at the moment that somebody asks, of each model's replicas."""

    def __init__(self, first_model: str, num_lost_lines: Callable[[], int]) -> None:
        self.supervisors: dict[str, Supervisor] = {}
        self._first_model, self._num_lost_lines = first_model, num_lost_lines

    def collect(self) -> Iterable[Metric]:
        lost = CounterMetricFamily(
            "hypocenter:log_lines_lost",
            "Lines of the log that could not be written.",
            labels=["model_name"],
        )
        lost.add_metric([self._first_model], self._num_lost_lines())
        yield lost
        labels = ["model_name", "engine"]
        families = [kind(name, text, labels=labels) for kind, name, text in _STATES]
        for model, supervisor in self.supervisors.items():
            waiting = sum(g.replica is None for g in supervisor.of_clients)
            for replica in supervisor.replicas:
                num_here = sum(g.replica == replica.number for g in supervisor.of_clients)
                # Whom no worker has yet is told of once, so that a sum over engines is right.
                num_here += 0 if replica.number else waiting
                for family, value in zip(families, _values(replica, num_here), strict=True):
                    family.add_metric([model, str(replica.number)], value)
        yield from families
        yield from self._configs()

    def _configs(self) -> Iterable[Metric]:
        names = ["model_name", "engine", "block_size", "num_gpu_blocks"]
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Always 1; its labels say how large the KV cache is.",
            labels=names,
        )
        for model, supervisor in self.supervisors.items():
            for replica in supervisor.replicas:
                if (facts := replica.facts) is not None:
                    sizes = [str(facts.block_size), str(facts.num_blocks)]
                    family.add_metric([model, str(replica.number), *sizes], 1)
        if family.samples:
            yield family


#: What a replica is at, in the order of `_values`.
_STATES: tuple[tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str], ...] = (
    (GaugeMetricFamily, "vllm:num_requests_running", "Requests that the model computes now."),
    (GaugeMetricFamily, "vllm:num_requests_waiting", "Requests that wait to be computed."),
    (
        GaugeMetricFamily,
        "vllm:kv_cache_usage_perc",
        "Share of the KV cache that running requests use, from 0 to 1.",
    ),
    (GaugeMetricFamily, "hypocenter:worker_ready", "1 while a worker takes requests, else 0."),
    (
        GaugeMetricFamily,
        "hypocenter:replica_lost",
        "1 once no worker is started there any more, else 0.",
    ),
    (
        CounterMetricFamily,
        "hypocenter:compiled_after_ready",
        "Forms of kernels that the worker compiled, or loaded, after it was ready.",
    ),
    (
        CounterMetricFamily,
        "hypocenter:disk_cache_blocks_read",
        "Blocks of the KV cache that the worker has read from disk.",
    ),
    (
        CounterMetricFamily,
        "hypocenter:disk_cache_blocks_written",
        "Blocks of the KV cache that the worker has written to disk.",
    ),
)


def _values(replica: Replica, num_open: int) -> list[float]:
    state, facts = replica.state, replica.facts
    used = 0.0
    if facts is not None and state.num_running:
        used = 1 - state.num_free_blocks / facts.num_blocks
    return [
        state.num_running,
        max(num_open - state.num_running, 0),
        used,
        int(replica.is_ready),
        int(replica.is_lost),
        state.num_compiled,
        state.num_disk_read,
        state.num_disk_written,
    ]
