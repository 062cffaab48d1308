"""Small Ollama model stores for tests: `add_model(tmp_path, "gemma4:e2b", gguf=data)`."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

IMAGE = "application/vnd.ollama.image."
CONFIG = {
    "model_format": "gguf",
    "model_family": "gemma4",
    "model_families": ["gemma4"],
    "model_type": "5.1B",
    "file_type": "Q4_K_M",
    "renderer": "gemma4",
    "parser": "gemma4",
    "architecture": "amd64",
    "os": "linux",
}


def add_blob(root: Path, data: bytes) -> str:
    """Write a blob; return its digest, "sha256:…"."""
    digest = hashlib.sha256(data).hexdigest()
    path = root / "blobs" / f"sha256-{digest}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return f"sha256:{digest}"


def layer(root: Path, kind: str, data: bytes | str, **more: Any) -> dict[str, Any]:
    """Write a blob; return its entry for a manifest."""
    data = data.encode() if isinstance(data, str) else data
    media_type = kind if "/" in kind else IMAGE + kind
    return {"mediaType": media_type, "digest": add_blob(root, data), "size": len(data)} | more


def manifest_path(root: Path, name: str) -> Path:
    """Return the path of the manifest of `[[HOST/]NAMESPACE/]MODEL:TAG`."""
    path, tag = name.rsplit(":", 1)
    parts = ["registry.ollama.ai", "library"][: 2 - path.count("/")] + path.split("/")
    return root.joinpath("manifests", *parts, tag)


def add_manifest(root: Path, name: str, manifest: Any) -> Path:
    """Write a manifest, bytes unchanged and anything else as JSON; return its path."""
    path = manifest_path(root, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode())
    return path


def add_model(
    root: Path,
    name: str = "gemma4:e2b",
    *,
    gguf: bytes | None = b"GGUF",
    layers: Iterable[tuple[str, bytes | str]] = (),
    config: dict[str, Any] | None = None,
) -> Path:
    """Add a model with `layers` of (kind, content); return the path of its manifest."""
    contents = [] if gguf is None else [("model", gguf)]
    docker = "application/vnd.docker."
    config_text = json.dumps(CONFIG if config is None else config)
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{docker}distribution.manifest.v2+json",
        "config": layer(root, f"{docker}container.image.v1+json", config_text),
        "layers": [layer(root, kind, data) for kind, data in [*contents, *layers]],
    }
    return add_manifest(root, name, manifest)
