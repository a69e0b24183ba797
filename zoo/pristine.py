"""Checks that code is unchanged since it was remembered: classes with the functions they call, torch's operations.

A proof is about code. Python allows anyone to replace code in a class, a module or a function, and then other code runs
than the one with the proof. `remember` stores the code of a class; `change_of` reports which part has changed since.
Code is compared by identity: functions, their bytecode and defaults, and what they call by a global name. Data are not
code.
"""

import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F

# Attributes that Python itself writes into a class, and code that has run before a model exists.
NOT_RUN = {
    "__init__", "__doc__", "__module__", "__slotnames__", "__dict__", "__weakref__", "__annotations__",
    "__annotations_cache__", "__annotate_func__", "__abstractmethods__", "__parameters__", "__orig_bases__",
    "__static_attributes__", "__firstlineno__",
}  # fmt: skip
REPLACED_BY_TORCH = {"__setstate__": "torch._dynamo.mutation_guard"}


@dataclass(frozen=True)
class _Function:
    """Everything except data that decides what a call does."""

    code: CodeType
    defaults: tuple[Any, ...]
    cells: dict[int, Any]
    called: dict[str, Any]  # by their global names

    def holds(self, function: FunctionType) -> bool:
        """Return True if the function is still this one. Names may have been added, but not removed or changed."""
        if function.__code__ is not self.code or len(defaults := _defaults(function)) != len(self.defaults):
            return False
        cells, own = function.__closure__ or (), function.__globals__
        return (
            all(one is other for one, other in zip(self.defaults, defaults, strict=True))
            and all(cells[k].cell_contents is value for k, value in self.cells.items())
            and all(own.get(name) is value for name, value in self.called.items())
        )


_functions: dict[FunctionType, _Function] = {}
_classes: dict[type, dict[str, Any]] = {}  # their code, by name
_called: dict[type, tuple[FunctionType, ...]] = {}


def remember(kind: type) -> None:
    """Store the code of a class and of its ancestors as it is now."""
    if kind in _called:
        return
    found: dict[FunctionType, None] = {}
    for base in kind.__mro__[:-1]:
        for value in _classes.setdefault(base, dict(_code_in(base, vars(base)))).values():
            _follow(value, found)
    _called[kind] = tuple(found)


def is_remembered(kind: type) -> bool:
    return kind in _called


def change_of(kind: type) -> str | None:
    """Return the changed part of a remembered class; None if nothing has changed."""
    for base in kind.__mro__[:-1]:
        if base not in _classes:
            return f"{base.__name__}, its new ancestor"
        if name := _change(base, _classes[base]):
            return f"{base.__name__}.{name}"
    return _changed_function(_called[kind])


def change_of_torch() -> str | None:
    """Return the operation of torch that was replaced; None if none was."""
    for space, then in _OPERATIONS:
        if name := _change(space, then):
            return f"{space.__name__}.{name}"
    return _changed_function(_OF_TORCH)


def _changed_function(functions: Iterable[FunctionType]) -> str | None:
    for function in functions:
        if not _functions[function].holds(function):
            return f"{function.__module__}.{function.__qualname__}, or what it calls"
    return None


def _change(space: type | ModuleType, then: dict[str, Any]) -> str | None:
    """Return the name of code in a class or module that was replaced, removed, or added and hides an inherited name."""
    now = vars(space)
    for name, value in then.items():
        if now.get(name) is not value and not _by_torch(name, now.get(name)):
            return name
    if isinstance(space, type) and len(now) != len(then):
        inherited = space.__mro__[1:-1]
        for name, value in now.items():
            new = name not in then and name not in NOT_RUN and _is_code(value)
            if new and (name.startswith("__") or any(name in vars(base) for base in inherited)):
                return name
    return None


def _by_torch(name: str, value: object) -> bool:
    """Return True if torch itself puts such a function there, after it has compiled something."""
    module = sys.modules.get(REPLACED_BY_TORCH.get(name, ""))
    return module is not None and isinstance(value, FunctionType) and value.__globals__ is vars(module)


def _is_code(value: object) -> bool:
    return callable(value) or hasattr(type(value), "__get__")


def _code_in(space: type | ModuleType, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    own = vars(space)
    return ((name, own[name]) for name in names if name in own and name not in NOT_RUN and _is_code(own[name]))


def _functions_in(value: object) -> Iterator[FunctionType]:
    """Yield the Python functions of a class attribute or a global."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, staticmethod | classmethod):
        yield from _functions_in(value.__func__)
    elif isinstance(value, property):
        for part in (value.fget, value.fset):
            yield from _functions_in(part)
    elif isinstance(value, functools.partial):
        yield from _functions_in(value.func)
    elif isinstance(value, type) and issubclass(value, torch.autograd.Function):
        for part in vars(value).values():
            yield from _functions_in(part)


def _follow(value: object, found: dict[FunctionType, None]) -> None:
    """Remember functions and, outside torch, those that they call by name."""
    for function in _functions_in(value):
        if function not in found:
            found[function] = None
            kept = _functions.get(function)
            if kept is None:
                kept = _functions[function] = _function(function)
            if not str(function.__globals__.get("__name__")).startswith("torch"):
                for inner in (*kept.called.values(), *kept.cells.values()):
                    _follow(inner, found)


def _function(function: FunctionType) -> _Function:
    own, cells = function.__globals__, {}
    for k, cell in enumerate(function.__closure__ or ()):
        try:
            content = cell.cell_contents
        except ValueError:  # still empty
            continue
        if callable(content):
            cells[k] = content
    named = {name: own[name] for name in _names(function.__code__) if name in own}
    called = {name: value for name, value in named.items() if callable(value) or isinstance(value, ModuleType)}
    return _Function(function.__code__, _defaults(function), cells, called)


def _defaults(function: FunctionType) -> tuple[Any, ...]:
    keywords = function.__kwdefaults__ or {}
    return (*(function.__defaults__ or ()), *keywords, *keywords.values())


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _names(part)


def _operations() -> Iterator[tuple[type | ModuleType, dict[str, Any]]]:
    yield torch, dict(_code_in(torch, [*dir(torch._C._VariableFunctions), *torch.functional.__all__]))
    for space in (F, torch.linalg, torch.special, torch.Tensor, torch._C.TensorBase):
        yield space, dict(_code_in(space, vars(space)))


_OPERATIONS = tuple(_operations())
_OF_TORCH: dict[FunctionType, None] = {}
for _, _code in _OPERATIONS:
    for _value in _code.values():
        _follow(_value, _OF_TORCH)
