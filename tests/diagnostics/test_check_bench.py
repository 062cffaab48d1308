"""`check`, `bench`, `gpus` and the options that choose a GPU, on a software one."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import gpu
from helpers.command import answer, refused, webgemma
from helpers.tiny import LARGE, MIXED, MOE, SMALL, Tiny, tiny_gguf
from helpers.tiny_drafter import TinyDrafter, drafter_gguf

from webgemma.cli.terminal import err
from webgemma.diagnostics.bench import Task, copy_rate, weights_read
from webgemma.diagnostics.check import (
    Mode,
    Report,
    compare,
    gpu_stages,
    reference_stages,
    token_ids,
)
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.sync import run_sync

NAME = gpu.device().name
BLOCKS = replace(MIXED, pattern="sf", ple=0, formats=("Q4_K", "Q8_0"))


def opened(tiny: Tiny) -> tuple[Gguf, Config, Model]:
    """Open a tiny model, and load it on the device."""
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(tiny), "tiny")))
    config = Config.from_gguf(gguf)
    return gguf, config, run_sync(Model.load(gguf, config, gpu.device()))


def checked(gguf: Gguf, config: Config, model: Model, mode: Mode) -> Report:
    """Check five tokens."""
    ids = token_ids(config, 5)
    truth = reference_stages(gguf, config, mode, ids)
    prompt, decode = (run_sync(gpu_stages(model, mode, ids, truth, n)) for n in (5, 1))
    return compare(config, mode, truth, prompt, decode)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    path.write_bytes(tiny_gguf(SMALL))
    return path


def test_check_agrees_layer_by_layer(model: Path) -> None:
    result = webgemma("check", model)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"small.gguf on {NAME}"
    stages = ["embedding", *(f"layer {i}" for i in range(6)), "final norm", "logits"]
    for line, stage in zip(lines[2:-1], stages, strict=True):
        assert line.startswith(f"ok       {stage}")
    assert lines[-1].startswith("Everything agrees: largest relative error ")
    assert lines[-1].endswith("the best token is the same 8 of 8 times.")


def test_check_as_json(model: Path) -> None:
    facts = answer("check", model, "--tokens", 3, "--kv", "f16", "--gpu", NAME[:4].upper())
    assert facts["ok"]
    assert (facts["device"], facts["tokens"]) == (NAME, 3)
    assert [stage["stage"] for stage in facts["stages"]][-2:] == ["final norm", "logits"]
    errors = [stage[mode] for stage in facts["stages"] for mode in ("prompt", "decode")]
    assert 0 < max(errors) < facts["limit"]


@pytest.mark.parametrize("tiny", [LARGE, MOE, BLOCKS], ids=["large", "moe", "blocks"])
@pytest.mark.parametrize("mode", [Mode("f32"), Mode("f16"), Mode("f32", "int16")], ids=str)
def test_every_kind_of_model_agrees(tiny: Tiny, mode: Mode) -> None:
    report = checked(*opened(tiny), mode)
    assert report.first_wrong is None
    assert report.worst.error < mode.limit / 10
    assert report.same_best == 5


def test_a_wrong_layer_is_named() -> None:
    """A weight that is damaged on the device shows in its layer, and only there."""
    gguf, config, model = opened(SMALL)
    wrong = model.matrices["blk.3.ffn_down.weight"].parts[0].data
    gpu.device().write(wrong.buffer, bytes(wrong.nbytes // 2))
    report = checked(gguf, config, model, Mode("f32"))
    assert [c.stage for c in report.comparisons if c.error > report.limit] == ["layer 3"]
    assert report.worst == report.first_wrong
    assert report.worst.error > 0.01


def test_with_experts_single_tokens_may_differ() -> None:
    gguf, config, _ = opened(MOE)
    truth = reference_stages(gguf, config, Mode(), token_ids(config, 5))
    made = [stage.copy() for stage in truth]
    made[2][3] *= 2
    assert compare(config, Mode(), truth, made, truth).first_wrong is None
    made[2][:3] *= 2
    wrong = compare(config, Mode(), truth, made, truth).first_wrong
    assert wrong is not None
    assert wrong.stage == "layer 1"


@pytest.mark.parametrize(
    ("factor", "sentence"),
    [
        (1.12, "Layer 2 differs by 12 %: this GPU"),
        (float("nan"), "Layer 2 is not finite: this GPU"),
    ],
)
def test_a_gpu_that_computes_wrong_values_is_reported(
    model: Path, monkeypatch: pytest.MonkeyPatch, factor: float, sentence: str
) -> None:
    async def wrong(*args: Any) -> Any:
        stages = await gpu_stages(*args)
        stages[3] = stages[3] * factor
        return stages

    monkeypatch.setattr("webgemma.diagnostics.check.gpu_stages", wrong)
    assert sentence in refused("check", model, "--tokens", 2)
    result = webgemma("check", model, "--tokens", 2, "--json")
    assert result.exit_code == 1
    facts = json.loads(result.stdout)
    assert not facts["ok"]
    assert (facts["stages"][3]["prompt"] is None) == (factor != factor)


def test_bench_measures_prompt_and_decode(model: Path) -> None:
    task = ("--prompt", 12, "--decode", 3, "--depth", 5, "--repetitions", 1)
    facts = answer("bench", model, *task, "--device", "gpu")
    assert (facts["device"], facts["precision"]) == (NAME, "exact")
    assert facts["task"] == {"prompt": 12, "decode": 3, "depth": 5, "repetitions": 1}
    assert facts["prompt_tokens_per_second"] > facts["decode_tokens_per_second"] > 0
    assert 0 < facts["host_seconds_per_token"] <= 1 / facts["decode_tokens_per_second"]
    assert facts["recording_seconds_per_token"] == 0  # in software nothing is recorded ahead
    assert facts["dispatches_per_token"] > 6 * 5  # six layers
    rate = facts["weights_nbytes_per_token"] * facts["decode_tokens_per_second"]
    assert facts["share_of_copy"] == pytest.approx(rate / facts["copy_nbytes_per_second"])


def test_bench_as_text(model: Path) -> None:
    task = ("--prompt", 2, "--decode", 1, "--repetitions", 1)
    result = webgemma("bench", model, *task, "--gpu", NAME)
    assert result.exit_code == 0, result.output
    words = [line.split()[0] for line in result.stdout.splitlines()[1:]]
    assert words == ["prompt", "decode", "load", "weights", "step"]


def test_bench_measures_what_drafts_are_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, draft = tmp_path / "small.gguf", tmp_path / "draft.gguf"
    path.write_bytes(tiny_gguf(SMALL))
    draft.write_bytes(drafter_gguf(TinyDrafter(SMALL)))
    monkeypatch.setattr("webgemma.diagnostics.drafts.WARM_UP_SECONDS", 0)
    monkeypatch.setattr("webgemma.cli.bench.SHARES", (0.5, 1.0))
    task = ("--prompt", 8, "--decode", 12, "--repetitions", 1, "--device", "gpu")
    facts = answer("bench", path, *task, "--draft", draft)["drafts"]
    assert facts["drafter"] == "draft.gguf"
    assert facts["tokens_per_second_without"] > 0
    assert [(each["share"], each["drafts"]) for each in facts["speeds"]] == [
        (share, drafts) for share in (0.5, 1.0) for drafts in (1, 3, 7)
    ]
    for each in facts["speeds"][3:]:
        assert each["accepted_per_step"] == each["drafts"]
    shown = webgemma("bench", path, *task, "--drafts")
    assert shown.exit_code == 0, shown.output
    lines = [line.strip() for line in shown.stdout.splitlines()[-3:]]
    assert lines[0].endswith("tokens/s without any; without the time of a drafter:")
    assert re.match(r"100% +of them right: [\d.]+ tokens/s, [\d.]+×, at best with \d a ", lines[2])


def test_what_drafts_cannot_be_measured(model: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft.gguf"
    assert "There is no file" in refused("bench", model, "--draft", draft)
    draft.write_bytes(drafter_gguf(TinyDrafter(LARGE)))
    task = ("--prompt", 8, "--decode", 8)
    assert "not the drafter of this model" in refused("bench", model, *task, "--draft", draft)
    assert "on a GPU only" in refused("bench", model, *task, "--drafts", "--device", "cpu")
    assert "choose one" in refused("bench", model, "--draft", draft, "--no-draft")


def test_bench_on_the_cpu(model: Path) -> None:
    task = ("--prompt", 4, "--decode", 2, "--depth", 3)
    facts = answer("bench", model, *task, "--device", "cpu")
    assert facts["device"] == "CPU (numpy)"
    assert facts["decode_tokens_per_second"] > 0
    assert "copy_nbytes_per_second" not in facts


def test_bench_computes_where_run_does(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU that is numpy."""
    task = ("bench", model, "--prompt", 3, "--decode", 1, "--repetitions", 1)
    monkeypatch.setattr("webgemma.device.listing.list_gpus", lambda _: [])
    assert answer(*task)["device"] == "CPU (numpy)"
    assert "No GPU found" in webgemma(*task, terminal=True).stderr
    assert "There is no GPU" in refused(*task, "--device", "gpu")
    assert "--lora is timed on a GPU only" in refused(*task, "--lora", "none")


def test_bench_needs_no_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "ids.gguf"
    missing: dict[str, object] = {f"tokenizer.ggml.{x}": None for x in ("tokens", "token_type")}
    tiny = replace(SMALL, metadata={**missing, "tokenizer.ggml.model": "none"})
    path.write_bytes(tiny_gguf(tiny))
    facts = answer("bench", path, "--prompt", 2, "--decode", 1, "--device", "cpu")
    assert facts["decode_tokens_per_second"] > 0


def test_a_machine_without_a_gpu_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webgemma.device.listing.list_gpus", lambda _: [])
    assert "There is no GPU" in refused("check", model)
    listed = webgemma("gpus")
    assert listed.exit_code == 0
    assert "finds no GPU" in listed.stdout


def test_the_weights_that_a_decode_step_reads() -> None:
    """In F32: every matrix once, one row of the tables, two of six experts."""
    _, config, model = opened(MOE)
    assert config.experts is not None
    width, ffn, expert_ffn = MOE.width, MOE.ffn, config.experts.ffn
    weights = MOE.vocab * width  # the head is the table
    for layer in config.layers:
        heads = 2 * layer.heads + (1 if layer.k_is_v else 2) * layer.kv_heads
        weights += width * (heads * layer.head_dim + 3 * ffn + config.experts.count)
        weights += config.experts.used * 3 * width * expert_ffn
    assert weights_read(model) == 4 * weights

    _, small, model = opened(replace(SMALL, pattern="sf", shared=0))
    every = sum(weight.nbytes for weight in model.matrices.values())
    table = model.matrices["per_layer_token_embd.weight"]
    assert weights_read(model) == every - table.nbytes + table.nbytes // small.vocab


def test_the_copy_rate_is_plausible() -> None:
    assert 1e7 < run_sync(copy_rate(gpu.device())) < 1e14


def test_gpus_are_listed() -> None:
    listed = answer("gpus")["gpus"]
    names = [entry["name"] for entry in listed]
    assert NAME in names
    assert sum(entry["default"] for entry in listed) == (not all(e["software"] for e in listed))
    assert all(entry["problem"] is None for entry in listed)
    assert NAME in webgemma("gpus").stdout


def test_logits_on_the_chosen_gpu(model: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids.txt"
    ids.write_text("2 30 31")
    facts = answer(
        *("logits", model, "--ids", ids, "--out", tmp_path / "l.npy"),
        *("--gpu", NAME, "--kv", "f32"),
    )
    cpu = answer("logits", model, "--ids", ids, "--out", tmp_path / "l.npy", "--device", "cpu")
    assert facts["argmax"] == cpu["argmax"]


def test_on_a_terminal_run_shows_that_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(err, "is_interactive", True)  # rich checks only once
    command = ("run", "-", "hi", "--max-tokens", 1)
    loading = webgemma(*command, "--gpu", NAME, terminal=True)
    assert "loading" in loading.stderr
    assert "No GPU" not in loading.stderr
    monkeypatch.setattr("webgemma.device.listing.list_gpus", lambda _: [])
    on_cpu = webgemma(*command, terminal=True)
    assert "No GPU found: computing on the CPU, in numpy." in on_cpu.stderr
    assert webgemma(*command).stderr.startswith("The reply was cut at 1 tokens")
    assert "No GPU" not in webgemma(*command, "--device", "cpu", terminal=True).stderr


@pytest.mark.parametrize(
    "command",
    [
        ["run", "hi"],
        ["check"],
        ["bench", "--prompt", "5"],
        ["logits", "--ids", "{ids}", "--out", "{out}"],
    ],
    ids=lambda command: command[0],
)
def test_an_unknown_gpu_gets_the_list(model: Path, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "ids").write_text("2")
    more = [arg.format(ids=tmp_path / "ids", out=tmp_path / "out") for arg in command[1:]]
    sentence = refused(command[0], model, *more, "--gpu", "Voodoo 2")
    assert "There is no GPU named 'Voodoo 2'" in sentence
    assert NAME in sentence


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["check", "--tokens", "0"], "use 1 to 128"),
        (["check", "--tokens", "129"], "use 1 to 128"),
        (["bench", "--prompt", "0"], "--prompt is 0"),
        (["bench", "--decode", "0"], "--decode is 0"),
        (["bench", "--depth", "-1"], "--depth is -1"),
        (["bench", "--repetitions", "0"], "--repetitions is 0"),
        (["bench", "--depth", "400"], "needs 1040 positions; the model's context is 512"),
    ],
    ids=str,
)
def test_wrong_tasks_get_a_sentence(model: Path, args: list[str], sentence: str) -> None:
    assert sentence in refused(args[0], model, *args[1:])


def test_a_task_that_just_fits() -> None:
    Task(500, 8, 4).check(512)
    with pytest.raises(InputError):
        Task(500, 8, 5).check(512)
