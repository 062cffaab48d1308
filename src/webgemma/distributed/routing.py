"""The request router of Ray Serve that keeps conversations on their replicas.

Ray makes it in the process that has the deployment's handle, from a copy of this module: what is
shared with others there has to be in another module."""

from collections import Counter
from typing import Any

from ray.serve.request_router import RequestRouter

from webgemma.distributed.conversations import Asked, homes_of

PATIENCE = 30  # times that a busy replica is asked before any other will do


class ConversationRouter(RequestRouter):  # type: ignore[misc]
    """Chooses the replica whose cache holds the beginning of a conversation."""

    def initialize_state(self, name: str = "") -> None:
        """Find the homes of the application."""
        self.homes = homes_of(name)
        self._asks: Counter[str] = Counter()  # of requests that have no replica yet

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return the one replica for a request or, if that does not answer, all of them."""
        asked = pending_request.args[0] if pending_request and pending_request.args else None
        if not isinstance(asked, Asked) or not candidate_replicas:
            return [candidate_replicas]
        self._asks[asked.id] += 1
        if self._asks[asked.id] > PATIENCE:
            return [candidate_replicas]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[by_name[self.homes.choose(asked, list(by_name))]]]

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Forget how often replicas were asked, which matters only while one is searched for."""
        del replica_id, internal_request_id
        if len(self._asks) > 1 << 12:
            self._asks.clear()
