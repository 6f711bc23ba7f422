"""Triton's interpreter in less time: what it does before every operation is done once in a process,
every type of a block is made once, sums of integers are not added a second time for a check whose
result nothing looks at, and bfloat16 is cut from float32, and widened to it, by a shift."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

EXPONENT, FRACTION = np.uint32(0x7F800000), np.uint32(0x007FFFFF)  # of a float32


def prepare_once(patch: pytest.MonkeyPatch) -> None:
    """Replace what takes most of the interpreter's time; nothing where no kernel has been imported,
    nor where kernels are compiled: types of the compiler are the interpreter's, too."""
    if (interpreter := sys.modules.get("triton.runtime.interpreter")) is None:
        return
    if not sys.modules["triton"].knobs.runtime.interpret:
        return
    patch.setattr(interpreter, "_patch_lang", _once(interpreter))
    patch.setattr(interpreter, "_patch_attr", _patch_attr(interpreter.interpreter_semantic))
    patch.setattr(interpreter, "_get_np_dtype", _numpy_dtypes(interpreter._get_np_dtype))
    patch.setattr(interpreter, "_convert_float", _conversion(interpreter))
    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    if not builder.options.debug:  # without it no assertion of a kernel's is looked at
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    _make_types_once(patch)
    patch.setattr(semantic, "broadcast_impl_value", _broadcast(semantic.broadcast_impl_value))


def _once(interpreter: Any) -> Callable[[Any], Any]:
    """The language is prepared for a function when it is first called, and stays so: each kernel of
    this process is interpreted."""
    prepare, prepared = interpreter._patch_lang, set[Any]()

    def prepare_if_needed(function: Any) -> Any:
        if function not in prepared:
            prepare(function)
            prepared.add(function)
        return interpreter._LangPatchScope()  # of which nothing is to be undone

    return prepare_if_needed


def _patch_attr(semantic: Any) -> Callable[..., None]:
    """A function of the language is given the interpreter's semantics, whatever else it is
    given."""

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        scope.set_attr(owner, name, call)

    return patch_attr


def _numpy_dtypes(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """numpy's name for a scalar of the language, looked up once."""
    import triton.language as tl

    known: dict[str, Any] = {}
    pointer = np.dtype(np.uint64)

    def numpy_dtype(kind: Any) -> Any:
        if isinstance(kind, tl.block_type):
            kind = kind.element_ty
        if isinstance(kind, tl.pointer_type):
            return pointer
        if (found := known.get(kind.name)) is None:
            found = known[kind.name] = find(kind)
        return found

    return numpy_dtype


def _make_types_once(patch: pytest.MonkeyPatch) -> None:
    """One type for all blocks of a shape and a kind of elements, and one shape for all tensors of a
    type: nothing changes them."""
    import triton.language.core as core

    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    known, is_same = dict[Any, Any](), core.dtype.__eq__
    scalar = core.tensor(None, core.int32)

    def block_type(cls: Any, element_ty: Any, shape: Any) -> Any:
        sizes = tuple(size.value if type(size) is core.constexpr else size for size in shape)
        key = element_ty.name, getattr(element_ty, "address_space", None), sizes
        if (found := known.get(key)) is None:
            found = object.__new__(cls)
            make_type(found, element_ty, shape)
            block = object.__new__(core.tensor)
            make_tensor(block, None, found)
            found.shared = block.shape, block.numel
            known[key] = found
        return found

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        if hasattr(kind, "shared"):
            self.shape, self.numel = kind.shared
        elif kind.is_block():
            make_tensor(self, handle, kind)
        else:
            self.shape, self.numel = scalar.shape, scalar.numel
        self.handle, self.type, self.dtype = handle, kind, kind.scalar

    patch.setattr(core.dtype, "__eq__", lambda one, other: one is other or is_same(one, other))
    patch.setattr(core.block_type, "__new__", block_type)
    patch.setattr(core.block_type, "__init__", lambda self, element_ty, shape: None)
    patch.setattr(core.block_type, "to_ir", lambda self, builder: self)
    patch.setattr(core.tensor, "__init__", tensor)


def _broadcast(broadcast: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Two blocks of one shape stay as they are."""

    def broadcast_if_needed(left: Any, right: Any) -> Any:
        ours, theirs = left.type, right.type
        if ours.is_block() and theirs.is_block() and ours.shape.values == theirs.shape.values:
            return left, right
        return broadcast(left, right)

    return broadcast_if_needed


def _conversion(interpreter: Any) -> Callable[..., Any]:
    """The bits that `_convert_float` gives, which are no subnormal's."""
    import triton.language as tl

    convert, nearest = interpreter._convert_float, interpreter._ir.ROUNDING_MODE.RTNE

    def converted(source: Any, source_type: Any, target_type: Any, rounding: Any) -> Any:
        kinds = source_type, target_type
        if kinds == (tl.bfloat16, tl.float32):
            bits = source.view(np.uint16).astype(np.uint32) << np.uint32(16)
        elif kinds == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(source).view(np.uint32)
        else:
            return convert(source, source_type, target_type, rounding)
        if (((bits & EXPONENT) == 0) & ((bits & FRACTION) != 0)).any():
            return convert(source, source_type, target_type, rounding)
        if target_type == tl.float32:
            return bits
        upper = bits >> np.uint32(16)
        if rounding == nearest:
            fraction = (upper & np.uint32(0x7F)) + ((bits >> np.uint32(15)) & np.uint32(1))
            upper = (upper & np.uint32(0xFF80)) | fraction
        return upper.astype(np.uint16)

    return converted
