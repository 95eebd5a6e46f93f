"""Tensors and arrays as what the core takes: address, number of elements, type."""

from typing import Any, Tuple

from ._weft import UsageError

Memory = Tuple[int, int, str]

_NUMBERS = ("float32", "float64", "bfloat16", "float16", "int32", "int64")


def is_tensor(x: Any) -> bool:
    return hasattr(x, "data_ptr") and hasattr(x, "untyped_storage")


def memory_of(x: Any) -> Memory:
    """Of a contiguous tensor on the CPU or a contiguous NumPy array. Types that cannot be added count as bytes."""
    if is_tensor(x):
        if x.device.type != "cpu" or not x.is_contiguous():
            raise UsageError("the memory of a tensor is given as it is only on the CPU and contiguous")
        address, count, item = x.data_ptr(), x.numel(), x.element_size()
        name = str(x.dtype).removeprefix("torch.")
    elif hasattr(x, "__array_interface__"):
        if not x.flags.c_contiguous or not x.flags.writeable:
            raise UsageError("an array must be contiguous and writeable")
        if not x.dtype.isnative:
            raise UsageError(f"an array of {x.dtype.str} has the other byte order than this machine: x.astype(x.dtype.newbyteorder('='))")
        address, count, item, name = x.ctypes.data, x.size, x.itemsize, x.dtype.name
    else:
        raise UsageError(f"a tensor or an array is needed, not {type(x).__name__}")
    return (address, count, name) if name in _NUMBERS else (address, count * item, "bytes")


class Staged:
    """A tensor's contiguous image on the CPU: the tensor itself where it is one, else a copy (pinned for CUDA).

    `put_back` writes the image into the tensor. Arrays are used as they are.
    """

    def __init__(self, x: Any, read: bool = True) -> None:
        self.origin = self.host = x
        if not is_tensor(x):
            return
        self.origin = self.host = x.detach()
        if x.layout != self._strided():
            raise UsageError("a sparse tensor cannot be sent as it is: coalesce() it and send its values and indices")
        # (A tensor may be the conjugate or the negative of its memory.)
        if x.device.type == "cpu" and x.is_contiguous() and not x.is_conj() and not x.is_neg():
            return
        self.host = host_like(self.origin)
        if read:
            self.host.copy_(self.origin)

    @staticmethod
    def _strided() -> Any:
        import torch

        return torch.strided

    @property
    def memory(self) -> Memory:
        return memory_of(self.host)

    def put_back(self) -> None:
        if self.host is not self.origin:
            self.origin.copy_(self.host)


def host_like(tensor: Any) -> Any:
    """An uninitialised contiguous tensor on the CPU; its memory is pinned where the tensor is on a GPU."""
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda")
