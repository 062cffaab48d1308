"""The command line as a person or a script uses it: replies, JSON, errors and exit codes."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import FIXTURES
from helpers.store import add_model
from helpers.tiny import SMALL, tiny_gguf
from helpers.tiny_vision import SMALL_VISION, vision_gguf
from PIL import Image
from rich.text import Text
from tolerance import LOGITS_OF_TRANSFORMERS
from typer.main import get_command

from webgemma.cli.program import app
from webgemma.packages import PACKAGED

DATA = tiny_gguf(SMALL)


def webgemma(
    *args: object, stdin: str | bytes = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command in its own process, as a shell does."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    result = subprocess.run(
        [sys.executable, "-m", "webgemma", *map(str, args)],
        input=data,
        capture_output=True,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **(env or {})},
        timeout=120,
        check=False,
    )
    return subprocess.CompletedProcess(
        result.args, result.returncode, result.stdout.decode(), result.stderr.decode()
    )


def refused(*args: object, **options: object) -> str:
    """Return the one sentence on standard error of a command that must exit with 1."""
    result = webgemma(*args, **options)
    assert result.returncode == 1, result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def store(tmp_path: Path) -> dict[str, str]:
    layers = [("system", b"Be brief."), ("params", b'{"temperature": 0, "num_predict": 5}')]
    add_model(tmp_path, "gemma4:tiny", gguf=DATA, layers=layers)
    add_model(tmp_path, "alice/story:v1", gguf=b"no model at all")
    return {"OLLAMA_MODELS": str(tmp_path), "WEBGEMMA_CACHE": str(tmp_path / "fetched")}


def test_from_a_pipe_it_replies_and_ends() -> None:
    result = webgemma("run", "--temperature", 0, stdin="What are you?\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("I am a small computer program: the tiny demo model")
    assert result.stderr == ""


def test_a_reply_as_json_with_a_seed(model: Path) -> None:
    options = ("--seed", 4, "--max-tokens", 6, "--temperature", 1.5, "--json")
    first, second = (
        json.loads(webgemma("run", model, "in the", *options).stdout) for _ in range(2)
    )
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert len(first["tokens"]) == len(first["logprobs"]) == 6
    assert first["finish"] == "length"


def test_the_likeliest_tokens_as_json(model: Path) -> None:
    options = ("run", model, "in the", "--temperature", 0, "--max-tokens", 3, "--json")
    plain = json.loads(webgemma(*options).stdout)
    facts = json.loads(webgemma(*options, "--top-logprobs", 4).stdout)
    top = facts.pop("top_logprobs")
    assert facts | {"seconds": 0} == plain | {"seconds": 0}
    assert [len(step) for step in top] == [4] * 3
    assert [step[0]["token"] for step in top] == facts["tokens"]
    assert [step[0]["logprob"] for step in top] == facts["logprobs"]
    assert all(isinstance(entry["text"], str) for step in top for entry in step)


@pytest.mark.parametrize("count", [-1, 21])
def test_the_likeliest_tokens_are_0_to_20(model: Path, count: int) -> None:
    sentence = refused("run", model, "in", "--json", "--top-logprobs", count)
    assert f"top_logprobs is {count}; it must be a whole number between 0 and 20" in sentence


def test_the_likeliest_tokens_are_for_scripts(model: Path) -> None:
    assert "--top-logprobs needs --json" in refused("run", model, "in", "--top-logprobs", 2)


def test_prompt_and_standard_input_are_joined(model: Path) -> None:
    options = ("--temperature", 0, "--max-tokens", 3, "--json")
    joined = webgemma("run", model, "the\n\ninner", *options)
    piped = webgemma("run", model, "the", *options, stdin="inner\n")
    assert json.loads(joined.stdout)["tokens"] == json.loads(piped.stdout)["tokens"]


def test_raw_continues_the_text(model: Path) -> None:
    raw, chat = (
        json.loads(
            webgemma(
                "run", model, "the", "--temperature", 0, "--max-tokens", 4, "--json", *more
            ).stdout
        )
        for more in (["--raw"], [])
    )
    assert raw["tokens"] != chat["tokens"]


def test_run_with_images(model: Path, tmp_path: Path) -> None:
    """Each reply depends on its image; what cannot be encoded gets a sentence."""
    mmproj, cat, dog = (tmp_path / name for name in ("mmproj.gguf", "cat.png", "dog.png"))
    mmproj.write_bytes(vision_gguf(replace(SMALL_VISION, positions=96)))
    Image.new("RGB", (30, 20), "orange").save(cat)
    Image.radial_gradient("L").save(dog)
    options = ("run", model, "the?", "--device", "cpu", "--max-tokens", 4, "--temperature", 0)
    replies = [
        json.loads(webgemma(*options, "--json", "--mmproj", mmproj, *more).stdout)["logprobs"]
        for more in ([], ["--image", cat], ["--image", dog], ["--image", cat])
    ]
    assert [replies.index(reply) for reply in replies] == [0, 1, 2, 1]
    assert "small.gguf cannot read images: there is no vision encoder" in refused(
        *options, "--image", cat
    )
    missing = refused(*options, "--image", cat, "--image", tmp_path / "missing.png")
    assert f"There is no file {tmp_path / 'missing.png'}." in missing
    assert "is not an image that Pillow can decode" in refused(*options, "--image", mmproj)
    assert "There is no file" in refused(*options, "--mmproj", tmp_path / "none.gguf")
    assert "need the chat template" in refused(*options, "--image", cat, "--raw")
    assert "must be one of 70, 140" in refused(*options, "--image", cat, "--image-budget", 71)


def test_an_ollama_model_has_its_own_defaults(store: dict[str, str]) -> None:
    first, second = (
        json.loads(webgemma("run", "gemma4:tiny", "in", "--json", env=store).stdout)
        for _ in range(2)
    )
    assert first["tokens"] == second["tokens"]  # its temperature is 0
    assert len(first["tokens"]) == 5  # and its num_predict 5


def test_list(store: dict[str, str]) -> None:
    table = webgemma("list", env=store)
    assert table.returncode == 0
    assert "gemma4:tiny" in table.stdout
    assert "alice/story:v1" in table.stdout
    listed = json.loads(webgemma("list", "--json", env=store).stdout)
    assert [entry["name"] for entry in listed] == ["-", "alice/story:v1", "gemma4:tiny"]
    assert listed[2]["nbytes"] >= len(DATA)


def test_list_marks_what_cannot_run(store: dict[str, str], tmp_path: Path) -> None:
    other = tiny_gguf(replace(SMALL, metadata={"general.architecture": "llama"}))
    add_model(tmp_path, "llama9:tiny", gguf=other)
    table = webgemma("list", env=store).stdout
    runs = {line.split()[0]: line.split()[-1] for line in table.splitlines()[1:5]}
    expected = {"-": "yes", "gemma4:tiny": "yes", "alice/story:v1": "no", "llama9:tiny": "no"}
    assert runs == expected
    assert "llama9:tiny cannot run: " in table
    assert "'llama', not Gemma 4" in table
    listed = json.loads(webgemma("list", "--json", env=store).stdout)
    assert {entry["name"]: "no" if entry["problem"] else "yes" for entry in listed} == expected


def test_list_of_an_empty_store(tmp_path: Path) -> None:
    env = {"OLLAMA_MODELS": str(tmp_path), "WEBGEMMA_CACHE": str(tmp_path)}
    result = webgemma("list", env=env)
    assert result.returncode == 0
    assert "ollama pull" in result.stdout
    (bundled,) = json.loads(webgemma("list", "--json", env=env).stdout)
    assert (bundled["name"], bundled["quantisation"], bundled["problem"]) == ("-", "Q8_0", None)


def test_list_names_a_fetched_model_that_was_damaged(store: dict[str, str]) -> None:
    model = PACKAGED["gemma3-270m"]
    path = Path(store["WEBGEMMA_CACHE"]) / model.name / model.file
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(model.nbytes)
    result = webgemma("list", env=store)
    assert result.returncode == 0
    assert "gemma3-270m cannot run: " in result.stdout


def test_show_prints_sizes_layers_and_memory(model: Path) -> None:
    shown = webgemma("show", model).stdout
    assert "320 tokens" in shown
    assert "sliding window 8" in shown
    facts = json.loads(webgemma("show", model, "--json", "--context", 100).stdout)
    assert facts["formats_nbytes"].keys() == {"F32"}
    assert [entry["kv"] for entry in facts["layers"]] == ["own"] * 3 + ["of 1", "of 1", "of 2"]
    memory = facts["memory_nbytes"]
    assert memory["kv_cache"] == 2 * 2 * 100 * (16 + 16 + 32)
    assert memory["per_layer_table"] == 4 * 16 * 6 * 320
    weights = sum(facts["formats_nbytes"].values())
    assert memory["weights"] + memory["per_layer_table"] == weights


def test_verify_finds_a_changed_byte(store: dict[str, str], tmp_path: Path) -> None:
    good = webgemma("verify", "gemma4:tiny", env=store)
    assert good.returncode == 0, good.stderr
    assert "ok" in good.stdout
    blob = tmp_path / "blobs" / f"sha256-{hashlib.sha256(DATA).hexdigest()}"
    assert json.loads(webgemma("verify", blob, "--json").stdout)["ok"]
    damaged = bytearray(DATA)
    damaged[-1] ^= 1
    blob.write_bytes(damaged)
    assert "is damaged" in refused("verify", "gemma4:tiny", env=store)
    assert "is damaged" in refused("verify", blob)
    result = webgemma("verify", "gemma4:tiny", "--json", env=store)
    assert result.returncode == 1
    assert not json.loads(result.stdout)["ok"]


def test_verify_a_plain_file(model: Path) -> None:
    assert "--sha256" in refused("verify", model)
    digest = hashlib.sha256(DATA).hexdigest()
    assert webgemma("verify", model, "--sha256", digest).returncode == 0
    assert "damaged" in refused("verify", model, "--sha256", "0" * 64)
    assert "digest" in refused("verify", model, "--sha256", "abc")


def test_verify_the_bundled_model() -> None:
    for args in (["verify", "-"], ["verify"]):
        result = webgemma(*args)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("ok  webgemma-demo-Q8_0.gguf")
    sentence = refused("verify", "-", "--sha256", "0" * 64)
    assert "is damaged" in sentence
    assert "Install webgemma again." in sentence


def test_without_a_model_it_is_the_bundled_one(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("2 30")
    out = tmp_path / "logits.npy"
    options = ("--ids", tmp_path / "ids.txt", "--out", out, "--device", "cpu", "--json")
    assert json.loads(webgemma("logits", *options).stdout)["shape"] == [2, 8192]
    assert json.loads(webgemma("show", "--json").stdout)["name"] == "the bundled model"
    assert json.loads(webgemma("tokenize", "--json", stdin="the").stdout)[0]["piece"] == "the"


def test_tokenize(model: Path) -> None:
    shown = webgemma("tokenize", model, "the inner", "--json")
    pieces = [entry["piece"] for entry in json.loads(shown.stdout)]
    assert pieces == ["the", "▁", "in", "n", "er"]
    assert "5 tokens" in webgemma("tokenize", model, stdin="the inner").stdout
    forged = json.loads(webgemma("tokenize", model, "<eos>", "--json").stdout)
    assert len(forged) > 1
    special = json.loads(webgemma("tokenize", model, "<eos>", "--special", "--json").stdout)
    assert [entry["id"] for entry in special] == [1]


def test_render(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    prompt = "<bos><|turn>user\nHi<turn|>\n<|turn>model\n"
    assert webgemma("render", stdin=json.dumps(messages)).stdout == prompt
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(messages))
    large = webgemma("render", file, "--size", "large", "--json")
    assert json.loads(large.stdout)["prompt"] == prompt + "<|channel>thought\n<channel|>"
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "ping"}}]')
    assert "declaration:ping" in webgemma("render", file, "--tools", tools).stdout


@pytest.mark.parametrize("as_json", [True, False])
def test_logits_equal_those_of_transformers(tmp_path: Path, model: Path, as_json: bool) -> None:
    truth = np.load(FIXTURES / "tiny" / "small.npz")
    ids = tmp_path / "ids.txt"
    tokens = truth["ids"].tolist()
    ids.write_text(json.dumps(tokens) if as_json else " ".join(map(str, tokens)))
    result = webgemma("logits", model, "--ids", ids, "--out", tmp_path / "l.npy", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    made = np.load(tmp_path / "l.npy")
    np.testing.assert_allclose(made, truth["logits"], rtol=0, atol=LOGITS_OF_TRANSFORMERS)


def test_a_missing_model_lists_what_exists(store: dict[str, str]) -> None:
    sentence = refused("run", "gemma4:e2b", "hi", env=store)
    assert "gemma4:tiny" in sentence
    assert "ollama pull gemma4:e2b" in sentence


def test_a_truncated_download(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(DATA[: len(DATA) // 2])
    assert "cut.gguf" in refused("run", cut, "hi")
    add_model(tmp_path, "gemma4:cut", gguf=DATA)
    digest = hashlib.sha256(DATA).hexdigest()
    (tmp_path / "blobs" / f"sha256-{digest}").write_bytes(DATA[:1000])
    sentence = refused("run", "gemma4:cut", "hi", env={"OLLAMA_MODELS": str(tmp_path)})
    assert "1000 of" in sentence or "1,000 of" in sentence


def test_another_architecture(tmp_path: Path) -> None:
    path = tmp_path / "llama.gguf"
    path.write_bytes(tiny_gguf(replace(SMALL, metadata={"general.architecture": "llama"})))
    for command in (("run", path, "hi"), ("show", path)):
        assert "'llama', not Gemma 4" in refused(*command)


def test_wrong_ids_get_a_sentence(tmp_path: Path, model: Path) -> None:
    for text, sentence in (
        ("2 320", "the id 320"),
        ("2 x", "token ids"),
        ("", "empty"),
        ("[1, true]", "token ids"),
        ("[" * 100_000, "token ids"),
        ("2 " * 600, "600 tokens, but the context holds 512"),
        ("9" * 5000, "token ids"),
    ):
        ids = tmp_path / "ids.txt"
        ids.write_text(text)
        assert sentence in refused("logits", model, "--ids", ids, "--out", tmp_path / "l.npy")
    assert not (tmp_path / "l.npy").exists()
    missing = refused("logits", model, "--ids", tmp_path / "none", "--out", tmp_path / "l.npy")
    assert "There is no file" in missing
    (tmp_path / "ids.txt").write_text("2 30")
    nowhere = tmp_path / "no folder" / "l.npy"
    assert "l.npy" in refused("logits", model, "--ids", tmp_path / "ids.txt", "--out", nowhere)


@pytest.mark.parametrize(
    ("args", "stdin", "sentence"),
    [
        (["run"], "", "There is no prompt"),
        (["run"], b"\xff\xfe", "not UTF-8"),
        (["run", "-", "hi", "--temperature", "-1"], "", "temperature"),
        (["run", "-", "hi", "--max-tokens", "-1"], "", "max_tokens"),
        (["run", "-", "hi", "--gpu", "no such thing"], "", "no GPU named"),
        (["run", "-", "hi", "--context", "0"], "", "context"),
        (["run", "-", "hi", "--stop", ""], "", "stop string"),
        (["run", "-", "no " * 2000], "", "tokens, but the context holds 1024"),
        (["run", "a//b", "hi"], "", "model name"),
        (["verify", "https://example.org/x.gguf"], "", "is on a server"),
        (["show", "-", "--context", "0"], "", "context"),
        (["render"], "not json", "is not JSON"),
        (["render"], "{}", "messages"),
        (["render"], '[{"role": 3}]', "role"),
        (["render", "--continue"], '[{"role": "user", "content": "x"}]', "continue"),
        (["tokenize", "no-such-file.gguf", "x"], "", "There is no file"),
        (["tokenize", ".", "x"], "", "folder"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_bad_input_gets_a_sentence(args: list[str], stdin: str | bytes, sentence: str) -> None:
    assert sentence in refused(*args, stdin=stdin)


def test_a_damaged_manifest_is_named_and_the_rest_listed(
    store: dict[str, str], tmp_path: Path
) -> None:
    broken = tmp_path / "manifests" / "registry.ollama.ai" / "library" / "broken"
    broken.mkdir(parents=True)
    (broken / "latest").write_text("{")
    result = webgemma("list", env=store)
    assert result.returncode == 0
    assert "gemma4:tiny" in result.stdout
    assert "broken" in result.stderr


def test_encoders_in_their_own_layer(tmp_path: Path) -> None:
    from webgemma.gguf.writer import NewTensor, gguf_bytes

    tensors = [NewTensor("mm.a.input_projection.weight", (640, 64), "F32", bytes(4 * 640 * 64))]
    projector = gguf_bytes({"general.architecture": "clip"}, tensors)
    add_model(tmp_path, "gemma4:audio", gguf=DATA, layers=[("projector", projector)])
    shown = webgemma("show", "gemma4:audio", "--json", env={"OLLAMA_MODELS": str(tmp_path)})
    facts = json.loads(shown.stdout)
    assert facts["encoders"] == {"vision": None, "audio": {"layers": 0, "width": 640}}


def test_output_into_a_closed_pipe_is_quiet(model: Path) -> None:
    command = f"{sys.executable} -m webgemma tokenize {model} | true"
    text = "the inner " * 20000
    result = subprocess.run(
        command, shell=True, input=text, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in result.stderr
    assert "Exception" not in result.stderr


def test_kernels_are_listed_and_printed() -> None:
    listed = json.loads(webgemma("kernels", "--json").stdout)
    ops = {entry["op"] for entry in listed}
    assert {"norm", "matmul", "sample", "round_f16", "attention_matrix_units"} < ops
    assert "rms(x[t]) * w" in webgemma("kernels").stdout
    facts = json.loads(webgemma("kernels", "matvec/Q6_K", "epilogue=geglu", "--json").stdout)
    assert facts["name"].startswith("matvec/Q6_K epilogue=geglu")
    assert facts["slots"]["epilogue"]["providers"] == ["clamp", "geglu", "lora", "none"]
    assert facts["parameters"]["up_stride"] == "u32"
    assert "fn main(" in facts["wgsl"]
    program = webgemma("kernels", "norm", "THREADS=64").stdout
    assert program.startswith("// norm")
    assert "// parameters: width: u32, eps: f32" in program
    assert "const THREADS: u32 = 64u;" in program
    on_units = webgemma("kernels", "matmul/Q8_0", "tiled_product=matrix_units").stdout
    assert "enable chromium_experimental_subgroup_matrix;" in on_units
    with_shuffles = webgemma("kernels", "norm", "--feature", "shuffle32").stdout
    assert "subgroupShuffle" in with_shuffles


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["nothing"], "There is no op 'nothing'"),
        (["norm", "store"], "must be SLOT=PROVIDER or CONSTANT=VALUE"),
        (["norm", "store=paper"], "the slot store needs a provider, float or half or integer"),
        (["norm", "kv=f16"], "norm has no slot kv"),
        (["norm", "LANES=4"], "has no constant LANES"),
        (["norm", "THREADS=many"], "a constant is a number"),
        (["norm", "THREADS=1.5"], "THREADS is u32, and 1.5 is of type float"),
        (["norm/Q4_K"], "norm reads no weights"),
        (["matvec/Q9"], "needs the format 'Q9'"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_wrong_kernels_get_a_sentence(args: list[str], sentence: str) -> None:
    assert sentence in refused("kernels", *args)


def test_help_and_version() -> None:
    for args in ((), ("--help",), ("run", "--help"), ("list", "-h")):
        result = webgemma(*args)
        assert "Usage" in result.stdout + result.stderr
    assert webgemma("--version").stdout.startswith("webgemma ")


def test_help_names_arguments_and_loses_no_words() -> None:
    for name, command in get_command(app).commands.items():
        for parameter in command.params:
            words = getattr(parameter, "help", None) or ""
            assert Text.from_markup(words).plain == words, f"{name} {parameter.name}"
            if parameter.param_type_name == "argument":
                assert parameter.metavar, f"{name} {parameter.name}"
