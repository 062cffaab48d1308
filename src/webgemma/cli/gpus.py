"""`webgemma adapters`: the GPUs that WebGPU finds, and whether they compute right."""

from dataclasses import asdict
from typing import Any

from rich.markup import escape

from webgemma.cli.options import JsonOption
from webgemma.cli.terminal import human_nbytes, out, sentences, write_json
from webgemma.device import Device
from webgemma.engine.selftest import selftest
from webgemma.errors import DeviceError
from webgemma.sync import run_sync


def adapters(as_json: JsonOption = False) -> None:
    """List the GPUs of this machine, and which one is taken.

    Example: webgemma adapters
    """
    with sentences():
        found = [_facts(device) for device in _devices()]
        hardware = [facts for facts in found if not facts["software"]]
        for facts in found:
            facts["taken"] = facts in hardware[:1]
        if as_json:
            write_json(found)
            return
        for facts in found:
            _print(facts)
        out.print(_verdict(found, hardware), style="dim", markup=False, soft_wrap=True)


def _devices() -> list[Device]:
    try:
        from webgemma.device import native
    except ImportError as error:
        raise DeviceError(f"WebGPU is not installed here ({error}): pip install wgpu.") from error
    return [native.NativeDevice(adapter) for adapter in native.adapters()]


def _facts(device: Device) -> dict[str, Any]:
    """All that is said of a GPU; it is let go."""
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
    out.print(f"{'→' if facts['taken'] else ' '} [bold]{escape(facts['name'])}[/]", soft_wrap=True)
    kind = "software" if facts["software"] else "GPU"
    out.print(f"    {kind}, {'self-test failed' if facts['problem'] else 'self-test passed'}")
    out.print(f"    features: {', '.join(facts['features']) or 'none'}")
    out.print(
        f"    limits: buffers of {human_nbytes(limits['buffer_nbytes'])}, of which a kernel sees "
        f"{human_nbytes(limits['binding_nbytes'])}",
        soft_wrap=True,
    )
    if facts["problem"]:
        out.print(f"    {facts['problem']}", style="red", markup=False, soft_wrap=True)


def _verdict(found: list[dict[str, Any]], hardware: list[dict[str, Any]]) -> str:
    if hardware:
        return f"webgemma takes {hardware[0]['name']}; another one with --adapter and its name."
    if found:
        return "There is only software: webgemma computes in numpy unless told --device gpu."
    return "WebGPU finds no GPU: webgemma computes on the CPU, in numpy."
