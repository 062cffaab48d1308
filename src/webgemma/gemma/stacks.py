"""Which tensors of a file go to the GPU, and which of them as one matrix."""

from webgemma.device import Device
from webgemma.errors import DeviceError
from webgemma.gemma.config import Config
from webgemma.gemma.record.loop_limits import LONGEST_ROW
from webgemma.gemma.tensors import canonical_tensors, text_tensors
from webgemma.gguf.reader import Gguf, TensorInfo

TABLE = "per_layer_token_embd.weight"
HEAD_DIMS = (16, 32, 64, 128, 256, 512)  # that attention.wgsl can share out among its threads


def weights_nbytes(gguf: Gguf, config: Config) -> tuple[int, int]:
    """What the text model takes on a device: the table of per-layer embeddings, all the rest."""
    wanted = wanted_tensors(gguf, config)
    table = wanted[TABLE].nbytes if TABLE in wanted else 0
    return table, sum(tensor.nbytes for tensor in wanted.values()) - table


def wanted_tensors(gguf: Gguf, config: Config) -> dict[str, TensorInfo]:
    """The tensors of the text model."""
    tensors = canonical_tensors(gguf)
    names = [name for name, _, _ in text_tensors(config)]
    return {name: tensors[name] for name in names if name in tensors}


def stacks(tensors: dict[str, TensorInfo]) -> dict[str, list[TensorInfo]]:
    """The tensors to load: those that are always used together stacked, if their formats agree."""
    found = {name: [tensor] for name, tensor in tensors.items()}
    for name in tensors:
        if name.endswith(".attn_q.weight"):
            _stack(found, name, "attn_q", "attn_qkv", ("attn_k", "attn_v"))
        elif name.endswith(".ffn_gate.weight"):
            _stack(found, name, "ffn_gate", "ffn_gate_up", ("ffn_up",))
    return found


def _stack(
    stacks: dict[str, list[TensorInfo]], name: str, old: str, new: str, others: tuple[str, ...]
) -> None:
    """Put as many of the others under the first as have its format and block alignment."""
    whole = stacks.pop(name)
    for other in others:
        below = stacks.get(name.replace(old, other))
        if below is None or below[0].format != whole[0].format:
            break
        if whole[-1].weights // whole[-1].format.block % 16:
            break  # a plane's chunk would begin within a word
        whole += stacks.pop(name.replace(old, other))
    stacks[name.replace(old, new)] = whole


def check_kernels_fit(gguf: Gguf, config: Config, device: Device) -> None:
    """Refuse shapes that no Gemma 4 has and that the kernels would compute wrongly."""
    for layer in config.layers:
        if layer.head_dim not in HEAD_DIMS:
            raise DeviceError(
                f"{gguf.name}: heads of {layer.head_dim} dimensions are not possible on the GPU, "
                f"which has kernels for {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}; use device='cpu'."
            )
    for name, tensor in wanted_tensors(gguf, config).items():
        if len(tensor.shape) > 1 and tensor.width % 4:
            raise DeviceError(
                f"{gguf.name}: the rows of {name} have {tensor.width} weights, but the GPU reads "
                "four at a time; use device='cpu'."
            )
        if len(tensor.shape) > 1 and tensor.width > LONGEST_ROW and device.software:
            raise DeviceError(
                f"{gguf.name}: the rows of {name} have {tensor.width} weights, but {device.name} "
                f"is software that adds up {LONGEST_ROW} at most; use device='cpu'."
            )
