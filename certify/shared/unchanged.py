"""Snapshots of a model: a certificate is valid only while the model is what it was when it was measured.

Writes through torch raise a tensor's version or change its memory, which is detected at once. Writes that bypass torch
(`weight.data`, NumPy) do not; to detect them, digests of the numbers are compared where there is time for it.
"""

import hashlib
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from certizoo import UserError
from zoo.bounds import integrity

Mark = tuple[object, ...]


@dataclass(frozen=True)
class Snapshot:
    """The parts of a model when it was measured; the model itself is not kept alive."""

    model: weakref.ref[nn.Module]
    modules: dict[str, weakref.ref[nn.Module]]
    options: dict[str, str]
    tensors: dict[str, weakref.ref[Tensor]]
    marks: dict[str, Mark]
    digests: dict[str, bytes]

    @staticmethod
    def of(model: nn.Module) -> "Snapshot":
        modules, tensors = dict(integrity.parts_of(model)), dict(integrity.tensors_of(model))
        return Snapshot(
            weakref.ref(model),
            {path: weakref.ref(module) for path, module in modules.items()},
            _options(model),
            {path: weakref.ref(tensor) for path, tensor in tensors.items()},
            {path: _mark(tensor) for path, tensor in tensors.items()},
            {path: _digest(tensor) for path, tensor in tensors.items()},
        )

    def require(self, *, digests: bool) -> None:
        """Raise UserError if the model has changed.

        Without `digests`, numbers are read only of tensors that are new objects, have other memory, or were written by
        torch.
        """
        model = self.model()
        if model is None:
            return
        if changed := self._changed(model, digests):
            raise UserError(f"{changed} changed since this certifier was made; create a new certifier")

    def _changed(self, model: nn.Module, digests: bool) -> str | None:
        modules, tensors = dict(integrity.parts_of(model)), dict(integrity.tensors_of(model))
        for path in {**self.modules, **modules}:
            if path not in modules or path not in self.modules or self.modules[path]() is not modules[path]:
                return f"the module {path}"
        options = _options(model)
        for path in {**self.options, **options}:
            if options.get(path) != self.options.get(path):
                return f"the attribute {path}"
        for path in {**self.tensors, **tensors}:
            if path not in tensors or path not in self.tensors:
                return f"the weights of {path}"
            tensor = tensors[path]
            same = self.tensors[path]() is tensor and self.marks[path] == _mark(tensor)
            if (digests or not same) and _digest(tensor) != self.digests[path]:
                return f"the weights of {path}"
        return None


def _options(model: nn.Module) -> dict[str, str]:
    """Return the numbers and texts of every module, such as a stride or a scale, as text; not its mode."""
    return {
        f"{path}.{key}" if path else key: repr(value)
        for path, module in integrity.modules_of(model)
        for key, value in integrity.options_of(module)
        if key != "training"
    }


def _mark(tensor: Tensor) -> Mark:
    """Return a tensor's memory and version; inference tensors have no version."""
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, version


def _digest(tensor: Tensor) -> bytes:
    numbers = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{numbers.dtype} {tuple(numbers.shape)} ".encode())
    digest.update(numbers.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
