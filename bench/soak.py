"""Send a server thousands of requests of all kinds from many clients, and look for what is wrong.

    python bench/soak.py [MODEL] [--requests 2000] [--clients 64] [--device cpu] [--json]

The three APIs, streams and whole answers, several replies to a prompt, tools, long prompts, wrong
bodies and clients that leave, in an order that a seed decides. At the end it must hold: replies are
those that the server gave alone, nothing grew from round to round (GPU memory, memory, descriptors,
threads, tasks), and the server is idle, healthy and answers. Exit code 1 if something does not."""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from live import LiveServer, live_server

ROUNDS = 4
PATIENCE = 300.0  # seconds that an answer may take: many wait for one model
IDLE_SECONDS = 30.0
GROWTH = 48 * 2**20  # bytes of memory between the first and the last round
WORDS = ("dog", "girl", "boat", "river", "king", "bird", "tree", "house")
TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": TOOL}]
LONG = "The {} went up the hill and came down again. " * 12


@dataclass(frozen=True)
class Prompt:
    """What decides the replies, in whichever API it is sent."""

    text: str
    limit: int = 12  # tokens
    seed: int | None = None  # None: the likeliest tokens
    choices: int = 1
    tools: bool = False
    raw: bool = False  # continued, not replied to


@dataclass
class Job:
    """One request: where, what, and what must come of it."""

    kind: str
    path: str
    body: Any
    prompt: Prompt | None = None  # with known replies
    status: int = 200
    leave: float | None = None  # seconds, after which the client goes
    method: str = "POST"


@dataclass
class Found:
    """What was seen."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    rounds: list[dict[str, int | None]] = field(default_factory=list)


# Requests


def settings(prompt: Prompt, limit: str) -> dict[str, Any]:
    """Return the settings as OpenAI and Anthropic name them."""
    given: dict[str, Any] = {limit: prompt.limit}
    return given | ({"temperature": 0} if prompt.seed is None else {"seed": prompt.seed})


def openai_chat(prompt: Prompt) -> tuple[str, dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": prompt.text}], "n": prompt.choices}
    body |= {"tools": TOOLS} if prompt.tools else {}
    return "/v1/chat/completions", body | settings(prompt, "max_completion_tokens")


def openai_completions(prompt: Prompt) -> tuple[str, dict[str, Any]]:
    body = {"prompt": prompt.text, "n": prompt.choices}
    return "/v1/completions", body | settings(prompt, "max_tokens")


def openai_responses(prompt: Prompt) -> tuple[str, dict[str, Any]]:
    body = {"input": prompt.text, **settings(prompt, "max_output_tokens")}
    tools = [{"type": "function", **TOOL}]
    return "/v1/responses", body | ({"tools": tools} if prompt.tools else {})


def ollama_chat(prompt: Prompt) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt.text}]}
    body |= {"tools": TOOLS} if prompt.tools else {}
    return "/api/chat", body | {"options": settings(prompt, "num_predict")}


def ollama_generate(prompt: Prompt) -> tuple[str, dict[str, Any]]:
    return "/api/generate", {"prompt": prompt.text, "options": settings(prompt, "num_predict")}


def anthropic(prompt: Prompt) -> tuple[str, dict[str, Any]]:
    tool = {"name": TOOL["name"], "description": "Look.", "input_schema": TOOL["parameters"]}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt.text}]}
    body |= {"tools": [tool]} if prompt.tools else {}
    return "/v1/messages", body | settings(prompt, "max_tokens")


def can_send(api: Callable[..., Any], prompt: Prompt) -> bool:
    """Return whether an API has what a prompt needs."""
    if prompt.raw or api is openai_completions:
        return prompt.raw and api is openai_completions
    if prompt.choices > 1:
        return api is openai_chat
    if prompt.seed is not None and api is anthropic:
        return False
    return not (prompt.tools and api is ollama_generate)


APIS = (openai_chat, openai_completions, openai_responses, ollama_chat, ollama_generate, anthropic)


def wrong_jobs(model: str) -> list[Job]:
    """Return requests that must be refused, each with its status."""
    user = [{"role": "user", "content": "x"}]
    chat, picture = "/v1/chat/completions", {"url": "http://127.0.0.1/secret.png"}
    parts = [{"role": "user", "content": [{"type": "image_url", "image_url": picture}]}]
    cases: list[tuple[str, Any, int]] = [
        (chat, b"{", 400),
        (chat, b"\xff\xfe", 400),
        (chat, {"model": model, "messages": []}, 400),
        (chat, {"model": "other", "messages": user}, 404),
        (chat, {"model": model, "messages": user, "temperature": 200}, 400),
        (chat, {"model": model, "messages": user, "n": 1000}, 400),
        (chat, {"model": model, "messages": parts}, 400),
        (chat, {"model": model, "messages": user, "stream": True, "tool_choice": "required"}, 400),
        (chat, {"model": model, "messages": [{"role": "user", "content": "x " * 200_000}]}, 400),
        ("/v1/completions", {"model": model, "prompt": [2**40]}, 400),
        ("/v1/responses", {"model": model, "input": [], "stream": True}, 400),
        ("/v1/messages", {"model": model, "messages": user}, 400),
        ("/v1/messages", {"model": "../other", "messages": user, "max_tokens": 5}, 404),
        ("/api/chat", {"messages": user}, 400),
        ("/api/generate", {"model": "other", "prompt": "x"}, 404),
        ("/api/pull", {"model": model}, 501),
        ("/v1/nothing", {}, 404),
    ]
    return [Job("wrong", path, body, status=status) for path, body, status in cases]


def plan(model: str, count: int, draw: random.Random) -> Iterator[Job]:
    """Yield so many requests."""
    wrong = wrong_jobs(model)
    for _ in range(count):
        kind = draw.choices(
            ["answer", "choices", "tools", "long", "wrong", "leave", "look"],
            [50, 8, 6, 6, 12, 12, 6],
        )[0]
        if kind == "wrong":
            yield draw.choice(wrong)
            continue
        if kind == "look":
            path = draw.choice(["/v1/models", "/api/tags", "/api/ps", "/health", "/api/version"])
            yield Job("look", path, None, method="GET")
            continue
        word, seed = draw.choice(WORDS), draw.choice([None, None, 3])
        prompt = Prompt(f"Tell me about a {word}.", draw.choice([4, 12]), seed)
        if kind == "choices":
            prompt = replace(prompt, seed=5, choices=draw.choice([2, 3]), raw=draw.random() < 0.3)
        elif kind == "tools":
            prompt = replace(prompt, tools=True, limit=4)
        elif kind == "long":
            prompt = replace(prompt, text=LONG.replace("{}", word), limit=4)
        elif kind == "answer" and draw.random() < 0.15:
            prompt = replace(prompt, raw=True)
        path, body = draw.choice([api for api in APIS if can_send(api, prompt)])(prompt)
        body |= {"model": model, "stream": draw.random() < 0.6}
        if kind == "leave":
            yield Job(kind, path, body, leave=draw.choice([0.0, 0.02, 0.2, 1.0]))
        else:
            yield Job(kind, path, body, prompt)


# Answers


def whole_texts(path: str, answer: Mapping[str, Any]) -> list[str]:
    """Return the replies in a whole answer, in order."""
    if path == "/v1/chat/completions":
        return [choice["message"]["content"] or "" for choice in answer["choices"]]
    if path == "/v1/completions":
        return [choice["text"] for choice in answer["choices"]]
    if path == "/v1/responses":
        items = [item for item in answer["output"] if item["type"] == "message"]
        return ["".join(part["text"] for item in items for part in item["content"])]
    if path == "/v1/messages":
        return ["".join(part.get("text", "") for part in answer["content"])]
    return [answer["response"] if path == "/api/generate" else answer["message"]["content"]]


def event_texts(path: str, event: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield what an event of a stream adds to which reply; ValueError for an error."""
    if event.get("error") or event.get("type") == "error":
        raise ValueError(f"the stream ended with {json.dumps(event)[:200]}")
    if path == "/v1/chat/completions":
        for choice in event["choices"]:
            yield choice["index"], choice["delta"].get("content") or ""
    elif path == "/v1/completions":
        for choice in event["choices"]:
            yield choice["index"], choice["text"]
    elif path == "/v1/responses":
        if event["type"] == "response.output_text.delta":
            yield 0, event["delta"]
    elif path == "/v1/messages":
        if event["type"] == "content_block_delta":
            yield 0, event["delta"].get("text", "")
    else:
        yield 0, whole_texts(path, event)[0]


async def read_texts(job: Job, response: httpx.Response, choices: int) -> list[str]:
    """Return the replies of a stream."""
    texts = [""] * choices
    async for line in response.aiter_lines():
        text = line.removeprefix("data: ")
        if not text or text == "[DONE]" or text.startswith("event: "):
            continue
        for index, more in event_texts(job.path, json.loads(text)):
            texts[index] += more
    return texts


async def ask(http: httpx.AsyncClient, job: Job) -> list[str]:
    """Send a request and return its replies; ValueError if it is not answered as it must be."""
    content = job.body if isinstance(job.body, bytes) else json.dumps(job.body).encode()
    data = None if job.method == "GET" else content
    async with http.stream(job.method, job.path, content=data) as response:
        if response.status_code != job.status:
            said = (await response.aread()).decode("utf-8", "replace")
            raise ValueError(f"status {response.status_code}, not {job.status}: {said[:200]}")
        streams = response.headers["content-type"].startswith(("text/event", "application/x-nd"))
        if streams and job.status == 200:
            return await read_texts(job, response, job.prompt.choices if job.prompt else 1)
        whole = await response.aread()
        if job.status != 200 and "error" not in json.loads(whole):
            raise ValueError(f"no error is in {whole[:200]!r}")
        return whole_texts(job.path, json.loads(whole)) if job.prompt else []


# The soak


class Soak:
    """Sends all requests to one server."""

    def __init__(self, server: LiveServer, model: str, clients: int) -> None:
        self.server, self.model, self.clients = server, model, clients
        self.found = Found()
        self.known: dict[Prompt, list[str]] = {}
        self.idle: int | None = None  # tasks of the server while it has no requests
        self.http = self._connect()

    def _connect(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=self.clients, max_keepalive_connections=self.clients)
        return httpx.AsyncClient(
            base_url=self.server.url, timeout=PATIENCE, limits=limits, trust_env=False
        )

    async def run(self, jobs: list[Job]) -> Found:
        """Send all in some rounds, with a look at the server after each."""
        async with self.http:
            for prompt in {job.prompt for job in jobs if job.prompt}:
                self.known[prompt] = await ask(self.http, self._alone(prompt))
        self.idle = self.server.tasks()
        for at in range(ROUNDS):
            waiting = iter(jobs[at * len(jobs) // ROUNDS : (at + 1) * len(jobs) // ROUNDS])
            async with self._connect() as self.http:
                await asyncio.gather(*(self._client(waiting) for _ in range(self.clients)))
            async with self._connect() as self.http:  # all other connections are closed now
                await self._look()
        async with self._connect() as self.http:
            await self._last()
        return self.found

    def _alone(self, prompt: Prompt) -> Job:
        path, body = (openai_completions if prompt.raw else openai_chat)(prompt)
        return Job("alone", path, body | {"model": self.model}, prompt)

    async def _client(self, waiting: Iterator[Job]) -> None:
        for job in waiting:
            label = f"{job.kind} {job.path} {str(job.body)[:160]}"
            try:
                texts = await self._one(job)
            except Exception as error:
                self.found.wrong.append(f"{label}: {type(error).__name__} {error}")
                continue
            if job.prompt and texts != self.known[job.prompt]:
                expected = self.known[job.prompt]
                self.found.wrong.append(f"{label}: the text is {texts}, alone it is {expected}")
            self.found.counts[job.kind] += 1

    async def _one(self, job: Job) -> list[str]:
        if job.leave is None:
            return await asyncio.wait_for(ask(self.http, job), PATIENCE)
        with suppress(TimeoutError):
            await asyncio.wait_for(ask(self.http, job), job.leave)
        return []

    async def _look(self) -> None:
        """Wait until the server is idle, and note what it holds."""
        end = time.monotonic() + IDLE_SECONDS
        while await self._busy() and time.monotonic() < end:
            await asyncio.sleep(0.2)
        if await self._busy():
            self.found.wrong.append("The server is not idle: requests are still being served.")
        models = (await self.http.get("/api/ps")).json()["models"]
        self.found.rounds.append(
            {
                "gpu_nbytes": sum(model.get("size_vram", 0) for model in models),
                "rss_nbytes": self.server.rss(),
                "descriptors": self.server.descriptors(),
                "threads": self.server.threads(),
                "tasks": self.server.tasks(),
            }
        )

    async def _busy(self) -> bool:
        """Return whether a request is being served, as far as the server says it."""
        metrics = await self.http.get("/metrics")
        if metrics.status_code == 200:
            for line in metrics.text.splitlines():
                name, _, value = line.partition(" ")
                if name.endswith((":requests_processing", ":requests_deferred")) and float(value):
                    return True
            return False
        tasks = self.server.tasks()
        if tasks is None or self.idle is None:
            await asyncio.sleep(2.0)
            return False
        return tasks > self.idle

    async def _last(self) -> None:
        """Check what must hold at the end."""
        first, last = self.found.rounds[0], self.found.rounds[-1]
        for what, before in first.items():
            after = last[what]
            if before is None or after is None:
                continue
            # Threads wait for work, and a socket that was just left may still be there.
            allowed = {"rss_nbytes": GROWTH, "threads": 2, "descriptors": 4}.get(what, 0)
            if after - before > allowed:
                self.found.wrong.append(f"{what} grew from {before} to {after}.")
        health = await self.http.get("/health")
        if health.json() != {"status": "ok"}:
            self.found.wrong.append(f"/health says {health.text[:200]}.")
        for prompt, expected in list(self.known.items())[:1]:
            if await asyncio.wait_for(ask(self.http, self._alone(prompt)), PATIENCE) != expected:
                self.found.wrong.append("The last answer is not the one that was given alone.")


def summary(found: Found, count: int, clients: int, seconds: float) -> str:
    """Return the figures as one line."""
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(found.counts.items()))
    grown = []
    for what, before in found.rounds[0].items() if found.rounds else ():
        after = found.rounds[-1][what]
        if before is not None and after is not None:
            scale, unit = (2**20, " MiB") if what.endswith("nbytes") else (1, "")
            name = what.removesuffix("_nbytes")
            grown.append(f"{name} {before // scale} → {after // scale}{unit}")
    rate = count / seconds
    return (
        f"{count} requests of {clients} clients in {seconds:.0f} s ({rate:.1f}/s): {kinds}; "
        f"{', '.join(grown)}; {len(found.wrong)} wrong"
    )


def main() -> None:
    """Run the soak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="-")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1800, help="give up after this time")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with live_server([args.model, "--device", args.device, "--keep-alive", "-1"]) as server:
        name = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"][0]["id"]
        jobs = list(plan(name, args.requests, random.Random(args.seed)))
        soak = Soak(server, name, args.clients)
        start = time.monotonic()
        try:
            asyncio.run(asyncio.wait_for(soak.run(jobs), args.seconds))
        except TimeoutError:
            soak.found.wrong.append(f"After {args.seconds:.0f} s it was not at its end.")
        except (httpx.HTTPError, ValueError) as error:
            soak.found.wrong.append(f"{type(error).__name__}: {error}")
        seconds, found = time.monotonic() - start, soak.found
        if server.process.poll() is not None:
            found.wrong.append(f"The server has ended: {''.join(server.said[-20:])}")
        elif not server.stop():
            found.wrong.append("The server did not stop when it was told to.")
        if any("Traceback" in line for line in server.said):
            found.wrong.append(f"The server printed a traceback: {''.join(server.said)[-2000:]}")
    for sentence in found.wrong[:20]:
        print(sentence, file=sys.stderr)
    if args.json:
        result = {"requests": args.requests, "clients": args.clients, "seconds": seconds}
        result |= {"kinds": found.counts, "rounds": found.rounds, "wrong": found.wrong}
        print(json.dumps(result))
    else:
        print(summary(found, args.requests, args.clients, seconds))
    raise SystemExit(1 if found.wrong else 0)


if __name__ == "__main__":
    main()
