"""Ray Serve's choice of a replica, by what each was given before (`known_beginnings.py`)."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from hypocenter.ray.known_beginnings import KnownBeginnings


class PrefixRouter(RequestRouter):  # type: ignore[misc] # Ray's types are not read
    """Ray Serve's way to choose: it is told the order, and takes the first that has room."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._known = KnownBeginnings()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Each replica a rank of its own, the cheapest first."""
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        prefix = b"" if pending_request is None else _prefix_in(pending_request)
        return [[by_id[name]] for name in self._known.in_order(list(by_id), prefix)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        self._known.note(replica_id, _prefix_in(pending_request))
        self._known.num_open[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._known.num_open[replica_id] = max(self._known.num_open[replica_id] - 1, 0)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._known.forget(replica_id)


def _prefix_in(request: PendingRequest) -> bytes:
    given = request.kwargs.get("prefix", b"")
    return given if isinstance(given, bytes) else b""
