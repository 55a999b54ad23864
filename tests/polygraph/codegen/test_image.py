"""Machine code laid out without a linker."""

import ctypes
import gc

import numpy as np
import pytest

from rtxarr.polygraph import _aot
from rtxarr.polygraph.codegen import _image, _llvm

pytestmark = pytest.mark.skipif(
    not _aot._Cpu.is_possible(), reason="needs x86-64, Linux and llvmlite"
)

FILL = """
define i32 @kernel(ptr %out, i64 %n) {
  %some = call ptr @malloc(i64 %n)
  call void @llvm.memset.p0.i64(ptr %some, i8 65, i64 %n, i1 false)
  call void @llvm.memcpy.p0.p0.i64(ptr %out, ptr %some, i64 %n, i1 false)
  call void @free(ptr %some)
  ret i32 7
}
declare ptr @malloc(i64)
declare void @free(ptr)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
"""
REMAINDER = """
define i32 @kernel(ptr %out, i64 %n) {
  %x = load double, ptr %out
  %y = frem double %x, 3.5
  %z = fadd double %y, 0.125
  store double %z, ptr %out
  ret i32 0
}
"""


def linked(*texts):
    return _image.link(_llvm.object_code(texts, "x86-64-v2"))


def test_functions_share_an_image():
    image = linked(FILL, REMAINDER, FILL.replace("i8 65", "i8 66"))
    assert set(image.entries) == {"k0", "k1", "k2"}
    assert image.imports.keys() <= _image.SYMBOLS
    code = _image.Code(image)
    functions = [code.function(f"k{i}", (ctypes.c_void_p, ctypes.c_int64)) for i in range(3)]
    out = np.zeros(3)
    assert functions[0](out.ctypes.data, 24) == 7
    assert out.tobytes() == b"A" * 24
    assert functions[2](out.ctypes.data, 8) == 7
    assert out.tobytes() == b"B" * 8 + b"A" * 16
    out[0] = 10.0
    assert functions[1](out.ctypes.data, 0) == 0
    assert out[0] == 3.125


def test_an_image_lies_anywhere():
    image = linked(REMAINDER)
    kept = [_image.Code(image) for _ in range(20)]
    out = np.zeros(1)
    for code in kept:
        out[0] = 10.0
        code.function("k0", (ctypes.c_void_p, ctypes.c_int64))(out.ctypes.data, 0)
        assert out[0] == 3.125
    del kept, code
    gc.collect()


def test_what_cannot_be_laid_out():
    with pytest.raises(ValueError, match="not of ELF for x86-64"):
        _image.link(b"\x7fELF" + bytes(100))
    changing = """
    @state = global i32 5
    define i32 @kernel(ptr %out) {
      %x = load i32, ptr @state
      %y = add i32 %x, 1
      store i32 %y, ptr @state
      ret i32 %y
    }
    """
    with pytest.raises(ValueError, match="data that changes"):
        linked(changing)


def test_functions_that_may_not_be_called():
    image = linked("""
    define i32 @kernel(ptr %out) {
      %x = call i32 @system(ptr %out)
      ret i32 %x
    }
    declare i32 @system(ptr)
    """)
    assert image.imports.keys() == {"system"}
    with pytest.raises(ValueError, match=r"must not call system\(\)"):
        _image.Code(image)
