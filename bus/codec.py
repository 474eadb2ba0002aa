"""Values to frames and back: MessagePack, with the memory of arrays and tensors beside it.

A value becomes ``payload | buffer...``. Without buffers the payload is the value in MessagePack. With buffers it is the
MessagePack array ``[table, value]``. The table (bin 32) has an entry for each buffer in turn: dtype, 1 byte; number of
dimensions, 1 byte; each dimension, 8 bytes, little-endian. In the value an ext type of 3 bytes, a buffer's index,
stands for each array (code 1) and tensor (code 2). So the buffers are judged before the value is read, and a limit of
3 bytes keeps out every longer ext type, of which MessagePack's timestamp is one.

Encoding never imports numpy or torch; decoding does where a message holds an array or a tensor. No name of a type comes
from the wire: a dtype is a number, its position in a closed table.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
import reprlib
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from msgpack import ExtType, Packer, unpackb

from stepcast.bus.errors import ProtocolError

#: Lists and dicts nested up to this depth can be sent and read with every release of msgpack. To count levels would be
#: a walk through each value, so deeper ones are refused only where msgpack's own limits lie (511 or 1024 levels).
MAX_DEPTH = 256
MAX_DIMENSIONS = 32  # of an array; numpy 1 has no more

_ARRAY, _TENSOR = 1, 2
_EXT_BYTES = 3
_TABLE_HEAD = b"\x92\xc6"  # in MessagePack: an array of two, the first of which is a bin with 4 bytes of length

# A dtype's code is its position here, so append only: to change a code is to change the protocol's version.
# fmt: off
_DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128", "bfloat16",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)
_ITEM_BYTES = (1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 8, 16, 2, 1, 1, 1, 1, 1)
_NUMPY_NAMES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
# fmt: on
_NUMPY_CODES = {name: code for code, name in enumerate(_NUMPY_NAMES)}
_ALLOWED = "None, bool, int (64 bit), float, str, bytes, list, tuple, dict, numpy arrays and numbers, torch CPU tensors"
#: All of memory as one array of bytes, to take slices of: for each length of its own ctypes would make one more class.
_Memory = ctypes.c_char * sys.maxsize

_Part = tuple[bytes, memoryview]  # a table's entry, and the buffer
_Entry = tuple[int, tuple[int, ...], memoryview]  # dtype code, shape, buffer
#: Packers that no call is using, each with the list that its hook fills. A call takes one and gives it back, so that
#: neither threads nor a call inside a call (a finalizer's) share one; `pop` and `append` are atomic.
_idle: list[tuple[Any, list[_Part]]] = []
_filters_lock = threading.Lock()


class _UnsendableError(Exception):
    """A value can't be sent; the message says what it is."""


def encode(value: Any, *, name: str = "step") -> list[bytes | memoryview]:
    """Encode a value into frames.

    Arrives as sent: None, bool, int (64 bit), float, str, bytes, list, dict (with keys of any type here that hashes),
    numpy arrays and torch CPU tensors of the closed dtypes. Arrives changed: bytearray and memoryview as bytes, tuple
    as list (in a dict's key as tuple), a numpy number as Python's (a complex one as a 0-d array), a subclass of a plain
    type as that type, a tensor detached. Bytes are always copied into the payload: send what is large as an array.

    The value must not change until the frames are sent, as contiguous arrays are not copied. msgpack's own ExtType and
    Timestamp are not looked for, as `decode` refuses them.

    Args:
        value: what to send.
        name: what errors call the value.

    Returns:
        The payload, then a buffer for each array and tensor, in the order in which they occur.

    Raises:
        ProtocolError: something in the value can't be sent; the message says where it is, what it is, what is allowed.
    """
    try:
        packer, parts = _idle.pop()
    except IndexError:
        parts = []
        packer = Packer(default=functools.partial(_pack_other, parts))
    try:
        payload: bytes = packer.pack(value)
    except Exception as error:
        path, got = _culprit(value, name) or (name, f"a value that fails with {type(error).__name__} ({error})")
        text = f"{path}: {got} can't be sent; allowed are {_ALLOWED}"
        raise ProtocolError(text, expected=_ALLOWED, got=got) from error
    frames: list[bytes | memoryview] = [payload]
    if parts:
        table = b"".join([entry for entry, _ in parts])
        payload = b"".join((_TABLE_HEAD, len(table).to_bytes(4, "big"), table, payload))
        frames = [payload, *[buffer for _, buffer in parts]]
        parts.clear()
    if len(payload) < 1 << 20:  # a packer keeps the memory that its largest payload has needed
        _idle.append((packer, parts))
    return frames


def _pack_other(parts: list[_Part], value: Any) -> Any:
    """Turn what the packer does not know into what it knows; put the memory of an array or tensor into `parts`."""
    if _is(value, "numpy", "ndarray"):
        ext_code, (dtype_code, buffer) = _ARRAY, _array_memory(sys.modules["numpy"], value)
    elif _is(value, "torch", "Tensor"):
        ext_code, (dtype_code, buffer) = _TENSOR, _tensor_memory(sys.modules["torch"], value)
    elif _is(value, "numpy", "generic") and value.dtype.str[1:] in _NUMPY_CODES:
        number = value.item()
        return _pack_other(parts, sys.modules["numpy"].asarray(value)) if isinstance(number, complex) else number
    else:
        big = isinstance(value, int)
        raise _UnsendableError("an int beyond 64 bits" if big else f"an object of type {type(value).__qualname__}")
    if (dimensions := len(value.shape)) > MAX_DIMENSIONS:
        raise _UnsendableError(f"an array of {dimensions} dimensions (at most {MAX_DIMENSIONS})")
    parts.append((struct.pack(f"<BB{dimensions}Q", dtype_code, dimensions, *value.shape), buffer))
    return ExtType(ext_code, (len(parts) - 1).to_bytes(_EXT_BYTES, "little"))


def _is(value: Any, package: str, kind: str) -> bool:
    # What is not imported has made no value. The default also serves where another thread is just importing it.
    return isinstance(value, getattr(sys.modules.get(package), kind, ()))


def _array_memory(numpy: Any, array: Any) -> tuple[int, memoryview]:
    name = array.dtype.str[1:]
    if name not in _NUMPY_CODES:
        raise _UnsendableError(f"a numpy array of dtype {array.dtype}")
    if type(array) is not numpy.ndarray:  # a mask, say, would be lost without a word
        raise _UnsendableError(f"a {type(array).__qualname__} (a subclass of numpy.ndarray)")
    flat = numpy.ascontiguousarray(array, dtype=f"<{name}").reshape(-1)  # copies only where it has to
    return _NUMPY_CODES[name], flat.view(numpy.uint8).data


def _tensor_memory(torch: Any, tensor: Any) -> tuple[int, memoryview]:
    code = _torch_dtypes()[1].get(tensor.dtype)
    if code is None:
        raise _UnsendableError(f"a tensor of dtype {tensor.dtype}")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise _UnsendableError(f"a {type(tensor).__qualname__} (a subclass of torch.Tensor)")
    if tensor.device.type != "cpu":
        raise _UnsendableError(f"a tensor on device {tensor.device} (call .cpu() first)")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise _UnsendableError(f"a sparse or nested tensor (layout {tensor.layout})")
    # Conjugate and negative may be mere flags, which the memory does not show.
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    address = dense.data_ptr()
    if not address:
        if dense.numel():
            raise _UnsendableError("a tensor that has no memory")
        return code, memoryview(b"")
    # Not through numpy, which torch can do without, and which has neither bfloat16 nor float8.
    memory: Any = _Memory.from_address(address)
    memory.owner = dense  # the view keeps `memory`, and that the tensor
    return code, memoryview(memory)[: dense.numel() * dense.element_size()].cast("B")


def _culprit(value: Any, path: str, depth: int = 0) -> tuple[str, str] | None:
    """Find what could not be packed, its place and what it is, by packing each leaf alone in the packer's order."""
    try:
        if isinstance(value, (dict, list, tuple)):
            if depth == MAX_DEPTH:
                return f"{path[:100]}...", f"what is nested deeper than {MAX_DEPTH} levels, or contains itself,"
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                shown = reprlib.repr(key)
                found = _culprit(key, f"the key {shown} of {path}", depth + 1)
                if found := found or _culprit(item, f"{path}[{shown}]", depth + 1):
                    return found
        else:
            Packer(default=functools.partial(_pack_other, [])).pack(value)
    except _UnsendableError as reason:
        return path, str(reason)
    except Exception as reason:  # noqa: BLE001 - any says why this one can't be sent
        return path, f"a {type(value).__qualname__} that fails with {type(reason).__name__} ({reason})"
    return None


def decode(frames: Sequence[bytes | memoryview]) -> Any:
    """Decode what `encode` made.

    Arrays and tensors are views of the buffers, and are to be read only: numpy sees to that, torch can't, and what a
    write to such a tensor does is undefined. A tensor whose buffer is not aligned is a copy.

    Args:
        frames: the payload, then the buffers.

    Returns:
        The value.

    Raises:
        ProtocolError: the frames are not what `encode` makes, or need numpy or torch, which is missing here.
    """
    if len(frames) == 1:  # plain values, as nearly always: the rest is for what this can't read
        try:
            return unpackb(frames[0], strict_map_key=False, ext_hook=_no_ext, max_ext_len=0)
        except Exception:  # noqa: BLE001, S110 - what it is, the long way finds out
            pass
    try:
        try:
            return _decode(frames)
        except TypeError:
            # A list as a key does not hash. It was sent as a tuple, so make it one; rare, hence not done at once.
            return _decode(frames, lambda pairs: {_frozen(key): item for key, item in pairs})
    except ProtocolError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, these bytes have caused it
        _bad(f"what can't be decoded ({type(error).__name__}: {error})", "what encode makes")


def _decode(frames: Sequence[bytes | memoryview], on_pairs: Callable[[Any], Any] | None = None) -> Any:
    payload, entries = (frames[0], []) if len(frames) == 1 else _read_table(frames)
    on_ext = functools.partial(_load, entries)
    # unpackb bounds all other lengths by the payload's, and the depth by its stack.
    value = unpackb(payload, strict_map_key=False, object_pairs_hook=on_pairs, ext_hook=on_ext, max_ext_len=_EXT_BYTES)
    if any(entries):
        _bad("a buffer that its value does not use", "each buffer used once")
    return value


def _no_ext(ext_code: int, data: bytes) -> NoReturn:
    raise ValueError(f"ext type {ext_code} of {len(data)} bytes, but no buffers")


def _frozen(key: Any) -> Any:
    return tuple(map(_frozen, key)) if type(key) is list else key


def _bad(got: str, expected: str) -> NoReturn:
    raise ProtocolError(f"a message holds {got}; expected {expected}", expected=expected, got=got)


def _read_table(frames: Sequence[bytes | memoryview]) -> tuple[bytes | memoryview, list[_Entry | None]]:
    """Judge the buffers by the table in the payload. Returns the payload's value, and an entry for each buffer."""
    payload = memoryview(frames[0]).cast("B")
    if payload[:2] != _TABLE_HEAD:
        _bad("buffers, but no table of them", "a payload that starts with the table")
    size = int.from_bytes(payload[2:6], "big")
    table, value = payload[6:][:size], payload[6:][size:]
    entries: list[_Entry | None] = []
    position = 0
    for frame in frames[1:]:
        buffer = memoryview(frame).cast("B").toreadonly()
        code, dimensions = struct.unpack_from("<BB", table, position)  # refuses to read past the table's end
        if code >= len(_DTYPES) or dimensions > MAX_DIMENSIONS:
            _bad(f"dtype {code} in {dimensions} dimensions", f"below {len(_DTYPES)}, at most {MAX_DIMENSIONS}")
        shape = struct.unpack_from(f"<{dimensions}Q", table, position + 2)
        position += 2 + 8 * dimensions
        if math.prod(shape) * _ITEM_BYTES[code] != len(buffer):  # Python's integers do not overflow
            _bad(f"{len(buffer)} bytes for shape {shape} of {_DTYPES[code]}", "the bytes that the shape needs")
        entries.append((code, shape, buffer))
    if position != size:
        _bad(f"{size} bytes of table for {len(entries)} buffers", f"{position} bytes")
    return value, entries


def _load(entries: list[_Entry | None], ext_code: int, data: bytes) -> Any:
    """Take the entry that an ext type names, and make an array or a tensor of it."""
    if ext_code not in (_ARRAY, _TENSOR) or len(data) != _EXT_BYTES:
        _bad(f"ext type {ext_code} of {len(data)} bytes", f"ext type {_ARRAY} or {_TENSOR} of {_EXT_BYTES} bytes")
    index = int.from_bytes(data, "little")
    entry = entries[index] if index < len(entries) else None
    if entry is None:
        _bad(f"buffer index {index}, used before or out of range", f"each of {len(entries)} buffers once")
    entries[index] = None
    code, shape, buffer = entry
    if ext_code == _TENSOR:
        return _tensor_over(code, shape, buffer)
    if code >= len(_NUMPY_NAMES):
        _bad(f"a numpy array of dtype {_DTYPES[code]}", "a dtype that numpy has")
    return _package("numpy").ndarray(shape, f"<{_NUMPY_NAMES[code]}", buffer)


def _tensor_over(code: int, shape: tuple[int, ...], buffer: memoryview) -> Any:
    torch, dtype = _package("torch"), _torch_dtypes()[0][code]
    if dtype is None:
        _bad(f"a tensor of dtype {_DTYPES[code]}", f"a dtype that torch {torch.__version__} has")
    if not buffer:
        return torch.empty(shape, dtype=dtype, device="cpu")
    tensor = torch.frombuffer(buffer, dtype=dtype)
    # libzmq may leave a small message anywhere in its receive buffer, and torch takes alignment for granted.
    return (tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor).reshape(shape)


@functools.cache
def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        _bad(f"what only {name} can hold", f"{name} to be installed here (pip install {name})")


@functools.cache
def _torch_dtypes() -> tuple[list[Any], dict[Any, int]]:
    """Return torch's dtypes by code, None where this torch lacks one, and the codes by dtype."""
    torch = _package("torch")
    dtypes = [getattr(torch, name, None) for name in _DTYPES]
    # Torch warns of a read-only buffer once in a process: now, unheard. Filters are slow to change, and global.
    with _filters_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)
    return dtypes, {dtype: code for code, dtype in enumerate(dtypes) if dtype is not None}
