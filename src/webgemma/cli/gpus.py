"""`webgemma gpus`: the GPUs that WebGPU finds, and whether they pass the self-test."""

from dataclasses import asdict
from typing import Any

from rich.markup import escape

from webgemma.cli.options import JsonOption
from webgemma.cli.terminal import format_nbytes, out, reported_errors, write_json
from webgemma.device import Device
from webgemma.engine.selftest import selftest
from webgemma.errors import DeviceError
from webgemma.sync import run_sync


def gpus(as_json: JsonOption = False) -> None:
    """List the GPUs of this machine, and which one is used by default.

    Example: webgemma gpus
    """
    with reported_errors():
        found = [_facts(device) for device in _devices()]
        hardware = [facts for facts in found if not facts["software"]]
        for facts in found:
            facts["default"] = facts in hardware[:1]
        if as_json:
            write_json(found)
            return
        for facts in found:
            _print(facts)
        out.print(_summary(found, hardware), style="dim", markup=False, soft_wrap=True)


def _devices() -> list[Device]:
    try:
        from webgemma.device import native
    except ImportError as error:
        raise DeviceError(f"WebGPU is not installed ({error}): run `pip install wgpu`.") from error
    return [native.NativeDevice(gpu) for gpu in native.list_gpus()]


def _facts(device: Device) -> dict[str, Any]:
    """Return the facts of a GPU, and close it."""
    problem = None
    try:
        run_sync(selftest(device))
    except DeviceError as error:
        problem = str(error)
    facts = {
        "name": device.name,
        "software": device.software,
        "features": sorted(device.features),
        "limits": asdict(device.limits),
        "problem": problem,
    }
    device.close()
    return facts


def _print(facts: dict[str, Any]) -> None:
    limits = facts["limits"]
    mark = "→" if facts["default"] else " "
    out.print(f"{mark} [bold]{escape(facts['name'])}[/]", soft_wrap=True)
    kind = "software" if facts["software"] else "GPU"
    out.print(f"    {kind}, self-test {'failed' if facts['problem'] else 'passed'}")
    out.print(f"    features: {', '.join(facts['features']) or 'none'}")
    out.print(
        f"    limits: buffers of {format_nbytes(limits['buffer_nbytes'])}, "
        f"bindings of {format_nbytes(limits['binding_nbytes'])}",
        soft_wrap=True,
    )
    if facts["problem"]:
        out.print(f"    {facts['problem']}", style="red", markup=False, soft_wrap=True)


def _summary(found: list[dict[str, Any]], hardware: list[dict[str, Any]]) -> str:
    if hardware:
        return f"webgemma uses {hardware[0]['name']}; --gpu NAME chooses another one."
    if found:
        return "There is only a software GPU: webgemma computes in numpy unless --device gpu."
    return "WebGPU finds no GPU: webgemma computes on the CPU, in numpy."
