"""Checks that a module computes what the code of its type says, and nothing else.

A certificate rests on code (the type) and numbers (the state). `fault_of(module)` reports anything else of the module
that takes part: a hook, a patched method, a weight or an option that computes by itself. `fault_of_process()` reports
the same for modes and hooks that all modules share. Code is known by its exact type, and is not inspected: the process
is trusted (docs/security.md). A module's own faults are found without asking the module, because an unknown class may
answer any attribute access as it likes.
"""

import enum
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

KEPT = ("_modules", "_parameters", "_buffers")
HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
PLAIN = (type(None), bool, int, float, str, np.float32, np.float64, np.int32, np.int64)
COMPUTES = ("__add__", "__radd__", "__mul__", "__rmul__", "__truediv__", "__float__", "__index__", "__torch_function__")
DEPTH = 8  # of nested lists; no rule reads deeper
GATHER = "gather the weights and certify the model inside"
MADE_BY_TORCH = {"__getstate__", "__deepcopy__"}  # the methods of a class that torch makes for parametrised weights
KNOWN: set[type[nn.Module]] = {
    kind
    for kind in (*vars(nn).values(), parametrize.ParametrizationList, *vars(parametrizations).values())
    if isinstance(kind, type) and issubclass(kind, nn.Module)
}
"""Types whose code is known: torch's modules, and those with rules (rule_table.py)."""


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module with its path, as they are stored; a shared module once."""
    seen: set[int] = set()
    left = [("", model)]
    while left:
        path, module = left.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module
            parts = [(key, part) for key, part in _parts(module).items() if isinstance(part, nn.Module)]
            left += [(f"{path}.{key}" if path else str(key), part) for key, part in reversed(parts)]


def parts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every inner module with its path, in the order they are stored; a shared one at each of its places."""
    for path, module in modules_of(model):
        for key, part in _parts(module).items():
            if isinstance(part, nn.Module):
                yield f"{path}.{key}" if path else key, part


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer with its path."""
    for path, module in modules_of(model):
        for key, tensor in own_tensors(module):
            yield f"{path}.{key}" if path else key, tensor


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of the module itself."""
    for kept in ("_parameters", "_buffers"):
        for key, tensor in _state(module).get(kept, {}).items():
            if tensor is not None:
                yield key, tensor


def options_of(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the attributes of the module itself that are numbers, texts, or tuples of them."""
    for key, value in _state(module).items():
        if all(type(one) in PLAIN for one in (value if type(value) is tuple else (value,))):
            yield key, value


def stored(module: nn.Module, path: str) -> Tensor | None:
    """Return a parameter or buffer by its path, or None if none is stored there, as for a parametrised weight."""
    *parts, name = path.split(".")
    for part in parts:
        if (inner := _parts(module).get(part)) is None:
            return None
        module = inner
    return dict(own_tensors(module)).get(name)


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Return the type of the module, without torch's parametrisations."""
    kind = type(module)
    return kind.__mro__[1] if _is_parametrized(module) else kind


def fault_of(module: nn.Module) -> str | None:
    """Describe what makes the module another function than its type's; None if nothing does."""
    return _fault_of_class(module) or _fault_of_state(module)


def fault_of_process() -> str | None:
    """Describe what changes the function of every module in this process."""
    for name in HOOKS:
        if getattr(torch_module, f"_global_{name}"):
            return f"torch.nn.modules.module._global_{name} is not empty; remove the hook before certifying"
    modes = [mode for mode in _get_current_function_mode_stack() if type(mode) is not DeviceContext]
    for mode in (*modes, *_get_current_dispatch_mode_stack()):
        return f"{type(mode).__name__} is active and may change every operation; certify outside of it"
    if torch.empty(()).is_meta:
        return "the default device is meta, which holds no numbers; run torch.set_default_device('cpu')"
    if torch.is_inference_mode_enabled():
        return "torch.inference_mode is active; certify outside of it"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func (vmap, grad, ...) is active; certify outside of it"
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            return f"torch.autocast is active for {device}; certify outside of it"
    if torch.get_default_dtype() not in (torch.float32, torch.float64):
        return f"the default dtype is {torch.get_default_dtype()}; run torch.set_default_dtype(torch.float32)"
    if torch.get_float32_matmul_precision() != "highest":
        return "matrix products do not have full float32 precision; run torch.set_float32_matmul_precision('highest')"
    if parametrize._cache_enabled:
        return "torch.nn.utils.parametrize.cached() is active; certify outside of it"
    return None


# the class of one object ----------------------------------------------------------------------------------------------


def _is_parametrized(module: nn.Module) -> bool:
    kind = type(module)
    return "parametrizations" in _parts(module) and kind.__name__ == f"Parametrized{kind.__mro__[1].__name__}"


def _fault_of_class(module: nn.Module) -> str | None:
    """Check a class for parametrised weights: it has no methods but torch's, and its parametrisations are known."""
    if not _is_parametrized(module):
        return None
    kind, lists = type(module), _parts(module)["parametrizations"]
    for name, value in vars(kind).items():
        if _is_code(value) and name not in MADE_BY_TORCH | _parts(lists).keys():
            return f"{kind.__name__}.{name} is not what torch's parametrisation makes; remove it"
    for path, part in modules_of(lists):
        if kind_of(part) not in KNOWN:
            name = path.split(".")[0]
            return (
                f"the parametrisation {type(part).__name__} of its {name} is not known; fold it first, by torch.nn."
                f"utils.parametrize.remove_parametrizations(module, {name!r})"
            )
    return None if len(kind.__bases__) == 1 else f"{kind.__name__} has several ancestors; remove them"


# the state of one object ----------------------------------------------------------------------------------------------


def _state(module: nn.Module) -> dict[str, Any]:
    """Return the instance's own dictionary, even if its class returns another."""
    found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return found


def _parts(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = _state(module).get("_modules", {})
    return found


def _fault_of_state(module: nn.Module) -> str | None:
    own = _state(module)
    for name in HOOKS:
        if own.get(f"_{name}"):
            return f"it carries a hook (_{name}); remove it before certifying"
    if own.get("_compiled_call_impl") is not None:
        return "it is compiled (_compiled_call_impl); certify it before model.compile()"
    if "_orig_mod" in _parts(module):
        return "it is compiled; certify the model inside, model._orig_mod"
    for kept in KEPT:
        if type(own.get(kept)) not in (dict, OrderedDict):
            return f"its {kept} is not a plain dictionary; {GATHER}"
    for name, part in own["_modules"].items():
        if part is not None and not isinstance(part, nn.Module):
            return f"its {name} is a {type(part).__name__}, not a module; assign a module"
    for name, tensor in (*own["_parameters"].items(), *own["_buffers"].items()):
        if tensor is not None and (fault := _fault_of_tensor(tensor)):
            return f"its {name} {fault}"
    for name in own.keys() - set(KEPT):
        if fault := _fault_of_attribute(type(module), own, name, own[name]):
            return f"its {name} {fault}"
    return None


def _fault_of_attribute(kind: type, own: dict[str, Any], name: str, value: object) -> str | None:
    if _hides(kind, name) or name.startswith("__"):
        return "is patched on the instance; delete that attribute"
    if any(name in own[kept] for kept in KEPT):
        return "hides a part of the same name; delete that attribute"
    if isinstance(value, nn.Module):
        return "is a module outside the model's parts; assign it as an attribute"
    return _fault_of_value(value)


def _fault_of_value(value: object, depth: int = 0) -> str | None:
    """Check an option: numbers, texts and lists of them are fine, other objects only if they cannot compute."""
    if type(value) in (tuple, list, set, frozenset, dict, OrderedDict, torch.Size):
        assert isinstance(value, Collection)
        items = value.values() if isinstance(value, dict) else value
        inner = (_fault_of_value(item, depth + 1) for item in items if depth < DEPTH)
        return next((fault for fault in inner if fault), None)
    if isinstance(value, Tensor):
        return _fault_of_tensor(value)
    if type(value) in PLAIN or isinstance(value, type | nn.Module):  # a module in a list is not a part
        return None
    if isinstance(value, enum.Enum) and not isinstance(value, int | float):
        return None
    if any(hasattr(type(value), name) for name in COMPUTES):
        return f"is a {type(value).__name__}, which may compute anything; set a plain number"
    if hasattr(value, "__deepcopy__"):
        return f"is a {type(value).__name__} with a __deepcopy__ of its own; set a plain value"
    return None


def _fault_of_tensor(tensor: object) -> str | None:
    if type(tensor) not in (Tensor, nn.Parameter):
        return f"is a {type(tensor).__name__}, not a plain tensor; {GATHER}"
    for name in vars(tensor):
        if _hides(type(tensor), name) or name.startswith("__"):
            return f"has its {name} patched; delete that attribute"
    return None


def _hides(kind: type, name: str) -> bool:
    """Return True if the class has code of that name, which an attribute of the instance would replace."""
    return _is_code(next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None))


def _is_code(value: object) -> bool:
    return callable(value) or hasattr(type(value), "__get__")
