"""Images in every accepted form, and errors for all others."""

import base64
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.questions import image, reply, user
from helpers.tiny import SMALL, tiny_gguf
from helpers.tiny_vision import SMALL_VISION, vision_gguf
from PIL import Image

from webgemma import Gemma, InputError
from webgemma.text.chat import Chat
from webgemma.text.markup import Media

CAT = np.random.default_rng(5).integers(0, 256, (30, 47, 3), np.uint8)


@pytest.fixture(scope="module", params=["gpu", "cpu"])
def gemma(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gemma]:
    """Model whose chats use 70 soft tokens per image, not 280: software GPUs are slow."""
    folder = tmp_path_factory.mktemp("models")
    path, mmproj = folder / "small.gguf", folder / "small.mmproj"
    path.write_bytes(tiny_gguf(replace(SMALL, context=1024)))
    mmproj.write_bytes(vision_gguf(replace(SMALL_VISION, positions=96)))
    with (
        pytest.MonkeyPatch.context() as patch,
        Gemma.load(path, request.param, mmproj=mmproj, kv="f32", precision="exact") as loaded,
    ):
        patch.setattr("webgemma.media.prompt.BUDGET", 70)
        yield loaded


@pytest.fixture(scope="module")
def png(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "cat.png"
    Image.fromarray(CAT).save(path)
    return path


def test_every_kind_of_source_is_encoded_alike(gemma: Gemma, png: Path) -> None:
    data = png.read_bytes()
    expected = gemma.encode_image(CAT, budget=70)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for source in (png, str(png), data, Image.fromarray(CAT), url):
        np.testing.assert_array_equal(gemma.encode_image(source, budget=70), expected)


def test_content_parts_of_other_apis_are_accepted(gemma: Gemma, png: Path) -> None:
    data = base64.b64encode(png.read_bytes()).decode()
    url = f"data:image/png;base64,{data}"
    expected = reply(gemma, [user(image(CAT), "this?")])
    for part in (
        {"type": "image", "path": png},
        {"type": "image", "url": url},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
    ):
        assert reply(gemma, [user(part, "this?")]) == expected
    for source in (png.read_bytes(), data, data.rstrip("="), str(png), url):
        assert reply(gemma, [{"role": "user", "content": "this?", "images": [source]}]) == expected


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image"}, r"messages\[0\].content\[0\] has no image: give it as 'image'"),
        (image("https://example.org/cat.png"), "nothing is fetched from servers"),
        ({"type": "image_url", "image_url": {"url": "http://x/a.png"}}, "nothing is fetched"),
        ({"type": "image", "url": "cat.png"}, "must be a data: URL; a file is given as 'path'"),
        ({"type": "image_url", "image_url": {}}, "has no image"),
        (image("data:image/png"), "without a comma"),
        (image("data:image/png;base64,ä"), "neither a file nor base64"),
        (image("data:text/plain,hello"), r"content\[0\].image: The image is not an image"),
        (image("no such file.png"), "'no such file.png' cannot be opened"),
        (image({}), "An image must be a path, .* not dict"),
    ],
)
def test_invalid_image_parts_raise_an_error(gemma: Gemma, part: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        reply(gemma, [user(part, "this?")])


def test_invalid_sizes_and_budgets_raise_an_error(gemma: Gemma) -> None:
    with pytest.raises(InputError, match="not multiples of 12"):
        gemma.encode_image(CAT, resize=False)
    with pytest.raises(InputError, match="one of 70, 140, 280, 560, 1120 soft tokens, not 100"):
        gemma.encode_image(CAT, budget=100)
    with pytest.raises(InputError, match="cannot be opened"):
        gemma.encode_image("nothing.png")
    with pytest.raises(InputError, match="a side can have at most 384"):  # of this tiny encoder
        gemma.encode_image(np.zeros((1, 100, 3), np.uint8))


def test_placeholders_carry_their_sources() -> None:
    tool = {"role": "tool", "content": [image("b"), {"type": "text", "text": "done"}]}
    call = {"function": {"name": "look", "arguments": {}}}
    messages = [
        user("x", image("a")),
        {"role": "assistant", "tool_calls": [call]},
        tool,
        user({"type": "image", "path": "c"}),
    ]
    media = [part for part in Chat().parts(messages) if isinstance(part, Media)]
    assert [(m.source, m.field) for m in media] == [("a", "image"), ("b", "image"), ("c", "path")]
    assert media[0].where == "messages[0].content[1].image"


def test_a_missing_pillow_raises_an_error(gemma: Gemma, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "webgemma.media.image_files", raising=False)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match="decoded by Pillow, which is not installed"):
        gemma.encode_image(CAT)
