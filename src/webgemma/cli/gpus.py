"""`webgemma gpus`: the GPUs that wgpu-native and Dawn find, and whether they pass the self-test."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from webgemma.cli.options import JsonOption
from webgemma.cli.terminal import format_nbytes, out, reported_errors, write_json
from webgemma.device.opening import list_all_gpus, open_gpu
from webgemma.engine.selftest import check_matrix_units, selftest
from webgemma.errors import DeviceError
from webgemma.sync import run_sync

if TYPE_CHECKING:
    from webgemma.device.library import Adapter


def gpus(as_json: JsonOption = False) -> None:
    """List the GPUs of this machine, and which one is used by default.

    A GPU appears once for each WebGPU library that finds it: wgpu-native, and Dawn where it is
    installed (`pip install "webgemma[dawn]"`, or WEBGEMMA_DAWN=PATH), which reaches matrix units.

    Example: webgemma gpus
    """
    with reported_errors():
        adapters, problems = list_all_gpus()
        found = [_facts(gpu) for gpu in adapters]
        usable = [f for f in found if not f["software"] and not (f["problem"] and _is_dawn(f))]
        usable = [f for f in usable if f["matrix_shapes"] or not _is_dawn(f)] or usable
        for facts in found:
            facts["default"] = facts in usable[:1]
        if as_json:
            write_json({"gpus": found, "problems": problems})
            return
        for facts in found:
            _print(facts)
        for problem in problems:
            out.print(problem, style="yellow", markup=False, soft_wrap=True)
        out.print(_summary(found, usable), style="dim", markup=False, soft_wrap=True)


def _is_dawn(facts: dict[str, Any]) -> bool:
    return bool(facts["library"] == "dawn")


def _facts(gpu: "Adapter") -> dict[str, Any]:
    """Return the facts of a GPU; it is opened for that."""
    facts: dict[str, Any] = {
        "name": gpu.name,
        "library": gpu.library.key,
        "software": gpu.software,
        "features": sorted(gpu.features - {"threads"}),
        "subgroup_sizes": gpu.subgroup_sizes,
        "matrix_shapes": gpu.matrix_shapes,
        "no_matrix_units": _no_matrix_units(gpu),
        "limits": asdict(gpu.limits),
        "problem": None,
    }
    try:
        device = open_gpu(gpu)
    except DeviceError as error:
        return {**facts, "problem": str(error)}
    facts |= {"features": sorted(device.features), "matrix_shapes": device.matrix_shapes}
    if gpu.matrix_shapes and not device.matrix_shapes:
        facts["no_matrix_units"] = "they multiply wrongly"
    try:
        if wrong := run_sync(check_matrix_units(device)):
            facts |= {"features": sorted(device.features), "no_matrix_units": wrong}
        run_sync(selftest(device))
    except DeviceError as error:
        facts["problem"] = str(error)
    finally:
        device.close()
    return facts


def _no_matrix_units(gpu: "Adapter") -> str | None:
    """Return why a GPU has no matrix units for Dawn."""
    if gpu.library.key != "dawn" or gpu.matrix_shapes:
        return None
    if "shader-f16" not in gpu.features:
        return "the GPU or its driver has no float16"
    if "subgroup-matrix" not in gpu.features:
        return "the GPU or its driver offers none"
    return "none of them multiplies float16 into float32"


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _print(facts: dict[str, Any]) -> None:
    limits = facts["limits"]
    mark = "→" if facts["default"] else " "
    out.print(f"{mark} [bold]{escape(facts['name'])}[/]", soft_wrap=True)
    kind = "software" if facts["software"] else "GPU"
    out.print(f"    {kind}, self-test {'failed' if facts['problem'] else 'passed'}")
    out.print(f"    features: {', '.join(facts['features']) or 'none'}", soft_wrap=True)
    if facts["no_matrix_units"]:
        why = f"    matrix units: not used, {facts['no_matrix_units']}"
        out.print(why, markup=False, soft_wrap=True)
    elif facts["matrix_shapes"]:
        shapes = ", ".join(map(_shape, facts["matrix_shapes"]))
        out.print(f"    matrix units: {shapes} (float16 into float32)", soft_wrap=True)
    out.print(
        f"    limits: buffers of {format_nbytes(limits['buffer_nbytes'])}, "
        f"bindings of {format_nbytes(limits['binding_nbytes'])}",
        soft_wrap=True,
    )
    if facts["problem"]:
        out.print(f"    {facts['problem']}", style="red", markup=False, soft_wrap=True)


def _summary(found: list[dict[str, Any]], usable: list[dict[str, Any]]) -> str:
    if usable:
        return f"webgemma uses {usable[0]['name']}; --gpu NAME chooses another one."
    if found:
        return "There is only a software GPU: webgemma computes in numpy unless --device gpu."
    return "WebGPU finds no GPU: webgemma computes on the CPU, in numpy."
