"""What the server does now: `/metrics` for Prometheus, `/slots` as llama.cpp has it."""

from collections.abc import Awaitable, Callable
from typing import Any

from webgemma.server import metrics
from webgemma.server.http import respond, respond_text
from webgemma.server.metrics import Metrics, slots_of
from webgemma.server.openai_common import error_body
from webgemma.server.protocol import RequestError
from webgemma.server.registry import Registry


class Status:
    """The routes that say how things are."""

    def __init__(self, registry: Registry, counts: Metrics) -> None:
        self.registry, self.counts = registry, counts

    def routes(self) -> dict[str, Callable[[Any], Awaitable[Any]]]:
        """Return the endpoints by their paths."""
        return {"/metrics": self.metrics, "/slots": self.slots}

    async def metrics(self, _: Any) -> Any:
        """Return what was counted so far."""
        served = metrics.processing(self.registry.loaded())
        text = self.counts.prometheus(served, self.registry.requests - served)
        return respond_text(text, metrics.MEDIA_TYPE)

    async def slots(self, request: Any) -> Any:
        """List the slots; with fail_on_no_slot, status 503 if none is free."""
        slots = slots_of(self.registry.loaded())
        if request.query_params.get("fail_on_no_slot") and all(slot.busy for slot in slots):
            return respond(error_body(RequestError("No slot is free.", 503)), 503)
        return respond([slot.described() for slot in slots])
