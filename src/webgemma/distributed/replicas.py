"""Replicas of the server's application under Ray Serve, each with models of its own."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from webgemma.distributed.cluster import (
    cause_of,
    check_resources,
    connected,
    enter_folder,
    import_ray,
    quiet,
    remove_locks,
    take_gpu,
)
from webgemma.distributed.conversations import Asked, forget_homes, homes_of
from webgemma.errors import InputError
from webgemma.server.app import make_app
from webgemma.server.registry import MAX_REQUESTS, Registry

SCOPE = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "root_path": ""}
STOP_SECONDS = 2.0  # that a replica has to end what it does; its clients have their errors by then
HEALTH_SECONDS = 5.0  # between two looks at a replica

Message = MutableMapping[str, Any]  # of ASGI


@dataclass(frozen=True, slots=True)
class Served:
    """What the replicas offer, the same for each."""

    models: Sequence[str]
    options: Mapping[str, Any]  # of `Registry`
    gpus: Sequence[str]
    name: str  # of the application
    folder: str  # to which paths are relative


class Replica:
    """The server's application in a process of Ray's; `Guard` and `Keys` are before it."""

    def __init__(self, served: Served) -> None:
        enter_folder(served.folder)
        gpu = take_gpu(served.gpus, served.name)
        self.registry = Registry(served.models, gpu=gpu, **served.options)
        self.app = make_app(self.registry, loopback=False, page=False)  # which the ingress has
        self.name: str = import_ray("ray.serve").get_replica_context().replica_id.unique_id

    async def answer(
        self, asked: Asked, scope: Mapping[str, Any], body: bytes
    ) -> AsyncGenerator[str | list[Message], None]:
        """Yield the name of this replica, then the application's messages as they come.

        Cancelling this ends the reply at its next step."""
        del asked  # by it the router chose this replica
        yield self.name
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        serving = asyncio.create_task(self._serve({**SCOPE, **scope}, body, sent))
        try:
            more = True
            while more:
                messages = [await sent.get()]
                while not sent.empty():
                    messages.append(sent.get_nowait())
                more = messages[-1] is not None
                yield [message for message in messages if message is not None]
        finally:
            serving.cancel()
            await asyncio.wait([serving])

    async def _serve(
        self, scope: Message, body: bytes, sent: "asyncio.Queue[Message | None]"
    ) -> None:
        bodies = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not bodies:
                await asyncio.Future()  # who cancels says that the client has left
            return bodies.pop()

        async def send(message: Message) -> None:
            sent.put_nowait(message)

        try:
            await self.app(scope, receive, send)
        finally:
            sent.put_nowait(None)


class Replicas:
    """Replicas under Ray Serve, while `running` is entered."""

    def __init__(self, served: Served, count: int, num_gpus: float = 0) -> None:
        self.served, self.count, self.num_gpus = served, count, num_gpus
        self.homes = homes_of(served.name)
        self.handle: Any = None  # to which requests are passed

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start the replicas, which end with the block; InputError if they cannot be started."""
        serve, name = import_ray("ray.serve"), self.served.name
        with quiet(), connected(self.count) as ray:
            check_resources(ray, self.count, self.num_gpus)
            logs = {"log_level": "ERROR", "enable_access_log": False}
            try:
                serve.start(proxy_location="Disabled", logging_config=logs)
                self.handle = serve.run(
                    self._deployment(serve).bind(self.served),
                    name=name,
                    route_prefix=None,  # they are reached through the handle alone
                    logging_config=logs,
                )
            except Exception as error:
                raise InputError(f"The replicas do not start: {cause_of(error)}") from None
            try:
                yield
            finally:
                forget_homes(name)
                serve.delete(name, _blocking=False)
                remove_locks(name)

    def _deployment(self, serve: Any) -> Any:
        from webgemma.distributed.routing import ConversationRouter  # which is made of Ray

        return serve.deployment(
            Replica,
            name="replica",
            num_replicas=self.count,
            max_ongoing_requests=2 * MAX_REQUESTS,  # the application itself refuses what is more
            ray_actor_options={"num_cpus": 1, "num_gpus": self.num_gpus},
            graceful_shutdown_timeout_s=STOP_SECONDS,
            health_check_period_s=HEALTH_SECONDS,
            request_router_config=import_ray("ray.serve.config").RequestRouterConfig(
                request_router_class=ConversationRouter,
                request_router_kwargs={"name": self.served.name},
            ),
        )
