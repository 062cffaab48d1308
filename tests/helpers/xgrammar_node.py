"""web-xgrammar in Node, in the place of a page: the same JavaScript, called over a pipe."""

import json
import shutil
import subprocess
from base64 import b64decode
from pathlib import Path
from typing import Any

import webgemma.constraints

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "node_modules" / "@mlc-ai" / "web-xgrammar" / "lib" / "index.js"
SCRIPT = Path(webgemma.constraints.__file__).parent / "xgrammar.js"
NODE = shutil.which("node")
IS_INSTALLED = NODE is not None and LIBRARY.is_file()


class Node:
    """A process that has web-xgrammar; `open` is what xgrammar.js defines in a page."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [str(NODE), Path(__file__).with_suffix(".mjs"), LIBRARY, SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def call(self, *given: Any) -> Any:
        """Return the result of a call of xgrammar_node.mjs."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(given) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "node has ended"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    async def open(self, _: object, tokens: str, size: int, ends: str) -> "_Vocabulary":
        """Open a vocabulary; Node has the library itself, not its address."""
        return _Vocabulary(self, self.call("open", tokens, size, ends))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


class _Object:
    """An object of JavaScript, which is freed with this one."""

    def __init__(self, node: Node, number: int) -> None:
        self.node, self.number = node, number

    def call(self, name: str, *given: Any) -> Any:
        return self.node.call(name, self.number, *given)


class _Vocabulary(_Object):
    async def compile(self, ebnf: str) -> "_Matcher":
        return _Matcher(self.node, self.call("compile", ebnf))


class _Bytes(bytes):
    def to_bytes(self) -> bytes:
        return bytes(self)


class _Matcher(_Object):
    def mask(self) -> _Bytes:
        return _Bytes(b64decode(self.call("mask")))

    def accept(self, token: int) -> bool:
        return bool(self.call("accept", token))

    def rollback(self, count: int) -> None:
        self.call("rollback", count)

    def forced(self) -> str:
        return str(self.call("forced"))

    def copy(self) -> "_Matcher":
        return _Matcher(self.node, self.call("copy"))

    def __del__(self) -> None:
        if not self.node._process.stdin.closed:  # type: ignore[union-attr]
            self.call("free")
