"""What the server does now: `/metrics`, `/slots`, and a page for people at `/status`."""

import base64
import hashlib
import math
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from webgemma.server import metrics
from webgemma.server.http import respond, respond_text
from webgemma.server.loading import LoadedModel
from webgemma.server.metrics import Metrics, slots_of
from webgemma.server.openai_common import error_body
from webgemma.server.protocol import RequestError
from webgemma.server.registry import Registry

PAGE_PATH = Path(__file__).with_name("status.html")


class Status:
    """The routes that say how things are."""

    def __init__(self, registry: Registry, counts: Metrics) -> None:
        self.registry, self.counts = registry, counts
        self._page = PAGE_PATH.read_text("utf-8")
        self._page_headers = {
            "Content-Security-Policy": page_policy(self._page),
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
        }

    def routes(self) -> dict[str, Callable[[Any], Awaitable[Any]]]:
        """Return the endpoints by their paths."""
        return {
            "/metrics": self.metrics,
            "/slots": self.slots,
            "/status": self.page,
            "/status.json": self.status,
        }

    async def metrics(self, _: Any) -> Any:
        """Return what was counted so far."""
        served, waiting = self._requests()
        return respond_text(self.counts.prometheus(served, waiting), metrics.MEDIA_TYPE)

    async def slots(self, request: Any) -> Any:
        """List the slots; with fail_on_no_slot, status 503 if none is free."""
        slots = slots_of(self.registry.loaded())
        is_full = bool(slots) and all(slot.busy for _, slot in slots)
        if request.query_params.get("fail_on_no_slot") and is_full:
            return respond(error_body(RequestError("No slot is free.", 503)), 503)
        return respond([metrics.described(name, slot) for name, slot in slots])

    async def page(self, _: Any) -> Any:
        """Return the page, which holds nothing secret: it asks for a key where one is needed."""
        return respond_text(self._page, "text/html", self._page_headers)

    async def status(self, _: Any) -> Any:
        """Return what the page shows."""
        counts, (served, waiting) = self.counts, self._requests()
        return respond(
            {
                "seconds": counts.clock() - counts.started,
                "requests": {"processing": served, "deferred": waiting},
                "prompt": {
                    "tokens": counts.prompt_tokens,
                    "cached": counts.cached_tokens,
                    "per_second": counts.prompt_speed.throughput(),
                },
                "reply": {
                    "tokens": counts.reply_tokens,
                    "per_second": counts.reply_speed.throughput(),
                    "speed": counts.reply_speed.average(),
                },
                "loading": self.registry.loading(),
                "models": [_described(model) for model in self.registry.loaded()],
            }
        )

    def _requests(self) -> tuple[int, int]:
        """Return how many requests are served, and how many wait."""
        served = metrics.processing(self.registry.loaded())
        return served, self.registry.requests - served


def _described(model: LoadedModel) -> dict[str, Any]:
    leaves = None if model.expires == math.inf else max(0.0, model.expires - time.time())
    slots = [slot for _, slot in slots_of([model])]
    return {
        "name": model.offered.name,
        "requests": model.users,
        "context": max((slot.context for slot in slots), default=0),
        "nbytes": model.nbytes,
        "leaves": leaves,
        "slots": [
            {"busy": slot.busy, "tokens": slot.tokens, "context": slot.context} for slot in slots
        ],
    }


def page_policy(page: str) -> str:
    """Return the Content-Security-Policy of a page: its own script and style, and no others."""
    allowed = {
        name: " ".join(
            f"'{_digest(text)}'" for text in re.findall(f"<{name}>(.*?)</{name}>", page, re.S)
        )
        for name in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
