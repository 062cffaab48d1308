"""Time how many tokens a second a server streams to 1, 4, 16 and 64 clients.

    python bench/serve.py [MODEL] [--device gpu] [--clients 1,4,16,64] [--tokens 128] [--json]
    python bench/serve.py --peer http://127.0.0.1:8080 MODEL

The first form times the engine alone in this process, then `webgemma serve` in another, with the
same prompts; the second any server with OpenAI's API. Clients are bare sockets in one process: they
split chunks, and read as JSON only the last events. The rate is that of all clients together, from
the first request sent to the last token received; reading the prompts is a part of it. Each level
runs twice, and the first time, short, does not count: plans are recorded and kernels compiled."""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from live import live_server

from webgemma import Gemma

PATIENCE = 600.0  # seconds for one level
WARM_UP_TOKENS = 8
SUBJECTS = ("rivers", "clocks", "bread", "maps", "stars", "horses", "glass", "winter")


@dataclass
class Timed:
    """What so many clients at once got."""

    clients: int
    tokens: int
    seconds: float
    first: float  # seconds to the first token, the median of all clients

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def prompts(clients: int, first: int = 1000) -> list[str]:
    """Return a prompt for each client; no two begin alike, also of calls with another `first`."""
    return [
        f"{number} things about {SUBJECTS[number % len(SUBJECTS)]}, at length, please."
        for number in range(first, first + clients)
    ]


async def timed(calls: Sequence[Any]) -> Timed:
    """Time calls side by side; each returns its tokens and when the first one came."""
    start = time.perf_counter()
    found = await asyncio.wait_for(asyncio.gather(*calls), PATIENCE)
    seconds = time.perf_counter() - start
    first = statistics.median(when - start for _, when in found)
    return Timed(len(calls), sum(tokens for tokens, _ in found), seconds, first)


# The engine


async def engine_call(model: Gemma, prompt: str, settings: Any) -> tuple[int, float]:
    """Return the tokens of a reply and when the first came."""
    tokens, first = 0, 0.0
    async for _ in model.achat(prompt, **settings):
        tokens, first = tokens + 1, first or time.perf_counter()
    return tokens, first


async def time_engine(model: Gemma, levels: Sequence[int], tokens: int) -> list[Timed]:
    """Time the engine at each level."""
    settings = {"max_tokens": tokens, "logit_bias": unending(model)}
    await engine_call(model, "Hello", settings | {"max_tokens": 4})
    results = []
    for level in levels:
        short = settings | {"max_tokens": WARM_UP_TOKENS}
        await timed([engine_call(model, prompt, short) for prompt in prompts(level, 1)])
        calls = [engine_call(model, prompt, settings) for prompt in prompts(level)]
        results.append(await timed(calls))
    return results


def unending(model: Gemma) -> dict[int, float]:
    """Return a bias against the ends of a reply, so that all are of the same length."""
    return dict.fromkeys(sorted(model.tokenizer.ends), -1e6)


# The server


async def http_call(host: str, port: int, path: str, body: Any) -> tuple[int, float]:
    """Return the tokens of a streamed reply and when the first text came."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        head += "Authorization: Bearer none\r\nConnection: close\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        first, end, head_seen = 0.0, b"", False
        while b"[DONE]" not in end:
            some = await reader.read(1 << 16)
            if not some:
                break
            end = end[-4096:] + some  # the usage is in the last events
            if not head_seen and b"\r\n\r\n" in end:
                status = end.split(b" ", 2)[1]
                if status != b"200":
                    end += await reader.read()
                    raise SystemExit(f"The server answered {end.decode('utf-8', 'replace')[:500]}")
                head_seen = True
            if not first and b'"content": "' in some.replace(b'":"', b'": "'):
                first = time.perf_counter()
    finally:
        writer.close()
    return usage_of(end), first or time.perf_counter()


def usage_of(end: bytes) -> int:
    """Return the tokens that the last events of a stream tell."""
    for line in reversed(end.splitlines()):
        if line.startswith(b"data: {") and b'"completion_tokens"' in line:
            usage = json.loads(line[6:]).get("usage")
            if usage:
                return int(usage["completion_tokens"])
    raise SystemExit(f"The stream has no usage at its end: {end[-500:]!r}")


async def time_server(url: str, body: Any, levels: Sequence[int]) -> list[Timed]:
    """Time a server at each level."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    path = f"{parts.path.rstrip('/').removesuffix('/v1')}/v1/chat/completions"

    def call(prompt: str, **more: Any) -> Any:
        messages = [{"role": "user", "content": prompt}]
        return http_call(host, port, path, body | {"messages": messages} | more)

    await call("Hello", max_tokens=4)
    results = []
    for level in levels:
        await timed([call(prompt, max_tokens=WARM_UP_TOKENS) for prompt in prompts(level, 1)])
        results.append(await timed([call(prompt) for prompt in prompts(level)]))
    return results


def main() -> None:
    """Time the engine and the server, or another server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=None, help="as for webgemma run")
    parser.add_argument("--peer", nargs=2, metavar=("URL", "MODEL"), help="time this server")
    parser.add_argument("--clients", default="1,4,16,64")
    parser.add_argument("--tokens", type=int, default=128, help="of each reply")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--context", type=int)
    parser.add_argument("--slots", type=int, help="conversations that are computed at once")
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON for each request")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    levels = [int(level) for level in args.clients.split(",")]
    body = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": args.tokens}
    found: dict[str, list[Timed]] = {}
    if args.peer:
        url, name = args.peer
        # llama.cpp's server and vLLM know this; others ignore it, and their replies may be shorter.
        body |= {"model": name, "ignore_eos": True, **args.extra}
        found["peer"] = asyncio.run(time_server(url, body, levels))
    else:
        with Gemma.load(args.model, args.device, context=args.context, slots=args.slots) as model:
            where = model.device
            found["engine"] = asyncio.run(time_engine(model, levels, args.tokens))
            bias = {str(token): value for token, value in unending(model).items()}
        options = ["--device", args.device]
        options += ["--context", str(args.context)] if args.context else []
        options += ["--slots", str(args.slots)] if args.slots else []
        with live_server([args.model or "-", *options]) as server:
            body |= {"logit_bias": bias, **args.extra}
            found["HTTP"] = asyncio.run(time_server(server.url, body, levels))
    if args.json:
        rows = {
            what: [asdict(each) | {"rate": each.rate} for each in timings]
            for what, timings in found.items()
        }
        print(json.dumps(rows))
        return
    print(f"{args.tokens} tokens a reply" + ("" if args.peer else f", on {where}"))
    for what, timings in found.items():
        rates = "".join(f"{each.rate:10.1f}" for each in timings)
        firsts = "".join(f"{each.first * 1000:10.0f}" for each in timings)
        print(f"{'clients':16}{''.join(f'{level:10}' for level in levels)}")
        print(f"{what + ', tok/s':16}{rates}\n{'first token, ms':16}{firsts}")
    if "engine" in found:
        pairs = zip(found["HTTP"], found["engine"], strict=True)
        shares = "".join(f"{served.rate / own.rate:10.1%}" for served, own in pairs)
        print(f"{'HTTP / engine':16}{shares}")


if __name__ == "__main__":
    main()
