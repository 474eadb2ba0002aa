"""The codec: round trips, what each side refuses, and what it does not do: copy, import, change, leave behind."""

from __future__ import annotations

import copy
import gc
import math
import struct
import subprocess
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from contextlib import suppress
from enum import IntEnum
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepcast.bus.codec import MAX_DEPTH, decode, encode
from stepcast.bus.errors import ProtocolError

# fmt: off
NUMPY_DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
]
TORCH_DTYPES = [
    *NUMPY_DTYPES,
    "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]
# fmt: on
ARRAY, TENSOR = 1, 2
LIGHT = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# --- Helpers --------------------------------------------------------------------------------------------------------


def round_trip(value: Any) -> Any:
    """Encode, copy each frame as a socket would, decode."""
    return decode([bytes(frame) for frame in encode(value)])


def as_arrived(value: Any) -> Any:
    """Return what a plain value should arrive as."""
    if isinstance(value, (list, tuple)):
        return [as_arrived(item) for item in value]
    if isinstance(value, dict):
        return {key: as_arrived(item) for key, item in value.items()}
    return bytes(value) if isinstance(value, (bytearray, memoryview)) else value


def same(left: Any, right: Any) -> bool:
    """Compare plain values with their types, floats by their bits, dicts with their order."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    return bool(left == right)


def nested(depth: int, kind: type = list) -> Any:
    """Return containers in containers, `depth` of them."""
    value: Any = kind()
    for _ in range(depth - 1):
        value = [value] if kind is list else {"k": value}
    return value


def reference(code: int, index: int) -> bytes:
    """Return the MessagePack that stands for a buffer."""
    return b"\xc7\x03" + bytes([code]) + index.to_bytes(3, "little")


def entry(dtype: int, *shape: int) -> bytes:
    """Return a buffer's entry in the table."""
    return struct.pack(f"<BB{len(shape)}Q", dtype, len(shape), *shape)


def message(value: bytes, table: bytes, *buffers: bytes) -> list[bytes]:
    """Put a message with buffers together by hand."""
    return [b"\x92\xc6" + len(table).to_bytes(4, "big") + table + value, *buffers]


def refused(frames: list[Any], *words: str) -> None:
    """Assert that the frames are refused, for the reason meant."""
    with pytest.raises(ProtocolError) as caught:
        decode(frames)
    for word in words:
        assert word in str(caught.value)


def unsendable(value: Any, *words: str) -> None:
    """Assert that the value is refused, with a message that has the words."""
    with pytest.raises(ProtocolError) as caught:
        encode(value)
    for word in (*words, "can't be sent; allowed are None, bool"):
        assert word in str(caught.value)


def run(program: str, *options: str) -> None:
    """Run a program in a fresh interpreter."""
    result = subprocess.run(
        [sys.executable, *options, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


# --- Plain values ---------------------------------------------------------------------------------------------------

scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20) | st.binary()
)
keys = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
plain: st.SearchStrategy[Any] = st.recursive(
    scalars | st.binary().map(bytearray) | st.binary().map(lambda data: memoryview(data)),  # noqa: PLW0108 - mypy refuses the class
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 99) | st.binary(max_size=3), inner, max_size=5)
        | st.dictionaries(keys, inner, max_size=2)
    ),
    max_leaves=25,
)


@given(plain)
@LIGHT
def test_plain_values_arrive_equal(value: Any) -> None:
    """Every nesting of plain values arrives with equal types, bits and order; tuples as lists, buffers as bytes."""
    frames = encode(value)
    assert len(frames) == 1
    assert same(decode(frames), as_arrived(value))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, -(2**63), 2**64 - 1, "\0", "é\U0001f600", b""])
def test_extreme_scalars_arrive_equal(value: Any) -> None:
    """The ends of each range, and floats that are no numbers, pass."""
    assert same(round_trip([value]), [value])


def test_a_plain_payload_is_the_values_messagepack() -> None:
    """A value without arrays is one frame that any MessagePack reader understands."""
    value = {"a": [1, -1, 2.5, None, True, b"x"], 7: "t"}
    assert encode(value) == [msgpack.packb(value)]


def test_subclasses_of_plain_types_arrive_as_the_plain_type() -> None:
    """A named integer arrives as int, an ordered dict as dict."""
    colour = IntEnum("colour", {"RED": 3})
    assert same(round_trip([colour(3), OrderedDict(a=1)]), [3, {"a": 1}])


def test_a_tuple_as_a_key_arrives_as_a_tuple() -> None:
    """A dict whose keys are tuples, nested ones too, can be read back, whatever else the message has."""
    value = {(1, ("a", b"b")): [1, [2]], "other": {(): {2: 3}}}
    assert same(round_trip(value), value)


def test_a_long_payload_arrives_equal() -> None:
    """Bytes of megabytes travel in the payload, and the next message is not changed by them."""
    large = bytes(range(256)) * 8192
    assert round_trip({"large": large}) == {"large": large}
    assert round_trip([1]) == [1]


def test_memoryviews_are_decoded_like_bytes() -> None:
    """A frame may be any view of memory, as sockets that don't copy give."""
    assert decode([memoryview(bytearray(encode({"a": 1})[0]))]) == {"a": 1}


def test_encode_does_not_change_the_value() -> None:
    """The value is equal to its copy after it was encoded."""
    value = {"a": [1, (2, bytearray(b"3"))], (1,): {"b": None}}
    before = copy.deepcopy(value)
    encode(value)
    assert same(before, value)


@pytest.mark.parametrize("kind", [list, dict])
def test_the_documented_depth_is_carried(kind: type) -> None:
    """Lists and dicts nested as deep as MAX_DEPTH arrive."""
    value = nested(MAX_DEPTH, kind)
    assert round_trip(value) == value


# --- What can't be sent ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [{1}, frozenset(), object(), 1j, range(3), print, Exception("x"), type])
def test_an_unsupported_type_is_named(value: Any) -> None:
    """The error says where the value is, and of which type."""
    unsendable({"a": [0, 1, 2, value]}, f"step['a'][3]: an object of type {type(value).__qualname__}")


def test_errors_call_the_value_as_told() -> None:
    """The name given to encode starts the place."""
    with pytest.raises(ProtocolError, match=r"^result\[0\]: an object of type set"):
        encode([{1}], name="result")


def test_the_error_has_its_facts_as_attributes() -> None:
    """What was allowed and what came can be read without parsing the message."""
    with pytest.raises(ProtocolError) as caught:
        encode([object()])
    assert "torch CPU tensors" in caught.value.expected
    assert caught.value.got == "an object of type object"


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**30])
def test_an_int_beyond_64_bits_is_refused(value: int) -> None:
    """Integers that MessagePack has no room for are named."""
    unsendable([[value]], "step[0][0]: an int beyond 64 bits")


def test_a_str_that_is_not_unicode_is_refused() -> None:
    """A lone surrogate can't be written as UTF-8."""
    unsendable({"a": "\ud800"}, "step['a']: a str", "surrogates")


def test_a_memoryview_with_gaps_is_refused() -> None:
    """A view that is not contiguous is not bytes."""
    unsendable([memoryview(b"abcd")[::2]], "step[0]: a memoryview")


def test_a_key_that_can_not_be_sent_is_named() -> None:
    """The error says that it is the key, and of which dict."""
    unsendable([{frozenset(): 1}], "the key frozenset() of step[0]: an object of type frozenset")


def test_a_list_that_contains_itself_is_refused() -> None:
    """A cycle ends in an error, not in a crash or an endless loop."""
    cycle: list[Any] = [0]
    cycle.append(cycle)
    unsendable({"a": cycle}, "step['a'][1][1]", "contains itself")


@pytest.mark.parametrize("kind", [list, dict])
def test_too_deep_a_value_is_refused(kind: type) -> None:
    """Depth beyond every limit is an error of ours, and its message stays short."""
    with pytest.raises(ProtocolError, match=f"nested deeper than {MAX_DEPTH} levels") as caught:
        encode(nested(5000, kind))
    assert len(str(caught.value)) < 500


def test_a_failed_encode_leaves_nothing_behind() -> None:
    """After a failure the next message has no buffer of the failed one, and the failed array is free to go."""
    numpy = pytest.importorskip("numpy")
    array = numpy.ones(1000)
    alive = weakref.ref(array)
    with pytest.raises(ProtocolError):
        encode([array, object()])
    del array
    gc.collect()
    assert alive() is None
    assert len(encode([numpy.zeros(2)])) == 2


def test_an_encode_leaves_no_reference_behind() -> None:
    """Once its frames are gone, an array is free to go."""
    numpy = pytest.importorskip("numpy")
    array = numpy.ones(1000)
    alive = weakref.ref(array)
    encode([array])
    del array
    gc.collect()
    assert alive() is None


def test_an_encode_inside_an_encode_is_independent() -> None:
    """What runs while a value is packed may encode on its own."""
    numpy = pytest.importorskip("numpy")
    inner_frames: list[Any] = []

    class Nested(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            inner_frames.append(encode([numpy.arange(3)]))
            return super().items()

    outer = encode([numpy.arange(5), Nested(a=1)])
    assert [len(frame) for frame in outer[1:]] == [5 * 8]
    assert decode(inner_frames[0])[0].tolist() == [0, 1, 2]
    assert decode(outer)[1] == {"a": 1}


def test_threads_do_not_mix_their_messages() -> None:
    """Many threads encode and decode at once, each its own values."""
    numpy = pytest.importorskip("numpy")
    wrong: list[int] = []

    def work(number: int) -> None:
        for length in range(200):
            got = round_trip({"n": number, "a": numpy.full(length, number), "b": [number] * length})
            if got["a"].tolist() != got["b"] or got["b"] != [number] * length:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- Imports --------------------------------------------------------------------------------------------------------


def test_plain_values_import_neither_torch_nor_numpy() -> None:
    """A process that sends and reads plain values, or fails to, has imported neither."""
    run(
        "import sys\n"
        "from stepcast.bus.codec import decode, encode\n"
        "from stepcast.bus.errors import ProtocolError\n"
        "assert decode(encode({'a': [1, 2.0, b'3']})) == {'a': [1, 2.0, b'3']}\n"
        "try: encode([object()])\n"
        "except ProtocolError: pass\n"
        "else: raise SystemExit('not refused')\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )


@pytest.mark.parametrize(("code", "package"), [(ARRAY, "numpy"), (TENSOR, "torch")])
def test_a_missing_package_is_named(code: int, package: str) -> None:
    """Where the message needs a package that is not there, the error says what to install."""
    frames = message(reference(code, 0), entry(5, 1), b"x")
    run(
        "import sys\n"
        f"sys.modules[{package!r}] = None\n"
        "from stepcast.bus.codec import decode\n"
        "from stepcast.bus.errors import ProtocolError\n"
        f"try: decode({frames!r})\n"
        f"except ProtocolError as error: assert 'pip install {package}' in str(error), error\n"
        "else: raise SystemExit('not refused')\n"
    )


def test_reading_a_tensor_gives_no_warning() -> None:
    """A fresh process in which every warning is an error reads a tensor from read-only memory."""
    pytest.importorskip("torch")
    frames = message(reference(TENSOR, 0), entry(5, 1), b"x")
    run(f"from stepcast.bus.codec import decode\nassert decode({frames!r}).tolist() == [120]\n", "-W", "error")


def test_a_dtype_that_this_torch_lacks_is_named() -> None:
    """Where the sender's torch has more dtypes, the error says which one is missing."""
    pytest.importorskip("torch")
    frames = message(reference(TENSOR, 0), entry(15, 1), b"x")
    run(
        "import torch\n"
        "from stepcast.bus.codec import decode\n"
        "from stepcast.bus.errors import ProtocolError\n"
        "del torch.float8_e4m3fn\n"
        f"try: decode({frames!r})\n"
        "except ProtocolError as error: assert 'a tensor of dtype float8_e4m3fn' in str(error), error\n"
        "else: raise SystemExit('not refused')\n"
    )


# --- numpy ----------------------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@given(shape=shapes, layout=st.sampled_from(["plain", "transposed", "strided", "reversed", "big", "frozen"]))
@settings(LIGHT, max_examples=20)
def test_arrays_arrive_equal(dtype: str, shape: tuple[int, ...], layout: str) -> None:
    """Arrays of each dtype, shape and order arrive with equal bits, little-endian and read-only."""
    numpy = pytest.importorskip("numpy")
    kind = numpy.dtype(dtype)
    count = math.prod(shape)
    raw = numpy.random.default_rng(count).integers(0, 256, 2 * count * kind.itemsize, dtype="u1")
    both = (raw & 1).view(kind) if dtype == "bool" else raw.view(kind)
    array = {
        "plain": lambda: both[:count].reshape(shape),
        "transposed": lambda: both[:count].reshape(shape).T,
        "strided": lambda: both.reshape(*shape, 2)[..., 1],
        "reversed": lambda: both[:count].reshape(shape)[::-1] if shape else both[:1].reshape(()),
        "big": lambda: both[:count].reshape(shape).astype(kind.newbyteorder(">")),
        "frozen": lambda: numpy.frombuffer(both[:count].tobytes(), kind).reshape(shape),
    }[layout]()
    got = round_trip({"x": array})["x"]
    assert type(got) is numpy.ndarray
    assert (got.dtype, got.shape, got.flags.writeable) == (kind.newbyteorder("<"), array.shape, False)
    assert got.tobytes() == array.astype(kind).tobytes()


def test_the_frames_of_an_array_are_as_documented() -> None:
    """The payload is the MessagePack array [table, value], and the buffer is the array's memory."""
    numpy = pytest.importorskip("numpy")
    payload, buffer = encode({"x": numpy.arange(6, dtype="i2").reshape(2, 3)})
    assert [payload] == message(b"\x81\xa1x" + reference(ARRAY, 0), entry(2, 2, 3))
    assert bytes(buffer) == struct.pack("<6h", *range(6))
    table, _ = msgpack.unpackb(payload)
    assert table == entry(2, 2, 3)


def test_arrays_are_sent_without_a_copy() -> None:
    """The buffer shares memory with a contiguous array, and with its slices of rows."""
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(100.0).reshape(10, 10)
    for sent in (array, array[3:5], array.reshape(-1)):
        assert numpy.shares_memory(numpy.frombuffer(encode([sent])[1]), sent)


def test_arrays_are_read_without_a_copy() -> None:
    """A decoded array shares memory with the frame, and can't be written to even where the frame can."""
    numpy = pytest.importorskip("numpy")
    payload, buffer = encode([numpy.arange(100)])
    memory = bytearray(buffer)
    got = decode([payload, memoryview(memory)])[0]
    assert numpy.shares_memory(got, numpy.frombuffer(memory, "u1"))
    with pytest.raises(ValueError, match="read-only"):
        got[0] = 1


def test_an_array_with_gaps_is_copied() -> None:
    """What is not contiguous is sent as it was when it was encoded, and is not changed."""
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(6).reshape(2, 3)
    frames = encode(array.T)
    array[:] = 0
    assert decode(frames).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_the_same_array_twice_takes_two_buffers() -> None:
    """Each place in the value has a buffer of its own, in order."""
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(3)
    frames = encode([array, {"again": array}, numpy.zeros(0)])
    assert [len(frame) for frame in frames[1:]] == [24, 24, 0]
    assert decode(frames)[1]["again"].tolist() == [0, 1, 2]


def test_numpy_numbers_arrive_as_pythons() -> None:
    """Numbers of numpy arrive as int, float and bool of equal value; complex ones as arrays without dimensions."""
    numpy = pytest.importorskip("numpy")
    sent = [numpy.int8(-3), numpy.uint64(2**64 - 1), numpy.float16(1.5), numpy.float64(0.1), numpy.bool_(True)]
    assert same(round_trip(sent), [-3, 2**64 - 1, 1.5, 0.1, True])
    assert round_trip({numpy.int64(5): 1}) == {5: 1}
    got = round_trip(numpy.complex64(1 + 2j))
    assert (got.shape, got.dtype, got[()]) == ((), "c8", 1 + 2j)


@pytest.mark.parametrize("dtype", ["O", "U3", "S3", "M8[s]", "m8[s]", "V4", "i4,f4"])
def test_an_array_of_another_dtype_is_refused(dtype: str) -> None:
    """Objects, strings, dates and records are named with their dtype."""
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros(2, dtype)
    unsendable({"a": array}, f"step['a']: a numpy array of dtype {array.dtype}")


@pytest.mark.parametrize("name", ["longdouble", "clongdouble"])
def test_extended_precision_is_refused(name: str) -> None:
    """Floats whose format depends on the machine are not sent, as an array or as a number."""
    numpy = pytest.importorskip("numpy")
    kind = getattr(numpy, name)
    if numpy.dtype(kind).itemsize in (8, 16) and name == "clongdouble":
        pytest.skip("no extended precision on this machine")
    unsendable([numpy.zeros(2, kind)], "a numpy array of dtype")
    unsendable([numpy.datetime64("2020-01-01")], "an object of type datetime64")


def test_a_masked_array_is_refused() -> None:
    """A subclass is not sent as if it were a plain array."""
    numpy = pytest.importorskip("numpy")
    unsendable([numpy.ma.array([1], mask=[True])], "MaskedArray (a subclass of numpy.ndarray)")


def test_an_array_of_too_many_dimensions_is_refused() -> None:
    """What numpy 1 could not read is not sent; 32 dimensions are."""
    numpy = pytest.importorskip("numpy", "2.0")
    assert round_trip(numpy.zeros((1,) * 32)).shape == (1,) * 32
    unsendable(numpy.zeros((1,) * 33), "an array of 33 dimensions (at most 32)")


# --- torch ----------------------------------------------------------------------------------------------------------


def bits(tensor: Any) -> list[int]:
    """Return a tensor's bytes."""
    torch = sys.modules["torch"]
    dense = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return list(dense.view(torch.uint8).tolist()) if tensor.numel() else []


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@given(shape=shapes, layout=st.sampled_from(["plain", "transposed", "strided", "expanded"]))
@settings(LIGHT, max_examples=20)
def test_tensors_arrive_equal(dtype: str, shape: tuple[int, ...], layout: str) -> None:
    """Tensors of each dtype, shape (0-d, empty) and order arrive with equal bits."""
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype, None)
    if kind is None:
        pytest.skip(f"this torch has no {dtype}")
    count = math.prod(shape)
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (2 * count * kind.itemsize,), dtype=torch.uint8)
    both = raw.view(kind) if count else torch.empty(0, dtype=kind)
    tensor = {
        "plain": lambda: both[:count].reshape(shape),
        "transposed": lambda: both[:count].reshape(shape).permute(tuple(reversed(range(len(shape))))),
        "strided": lambda: both.reshape(*shape, 2)[..., 1],
        "expanded": lambda: both[:count].reshape(shape).expand(3, *shape),
    }[layout]()
    got = round_trip({"x": tensor})["x"]
    assert type(got) is torch.Tensor
    assert (got.dtype, got.shape, got.device.type) == (kind, tensor.shape, "cpu")
    assert bits(got) == bits(tensor)


def test_tensors_are_sent_without_a_copy() -> None:
    """A change of the tensor shows in the buffer, which starts at the slice that was sent."""
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(10, dtype=torch.uint8)
    _, buffer = encode(tensor[4:6])
    tensor[5] = 7
    assert bytes(buffer) == b"\0\7"
    assert (buffer.format, buffer.nbytes) == ("B", 2)  # type: ignore[union-attr]


def test_tensors_are_read_without_a_copy() -> None:
    """A change of the frame's memory shows in the tensor."""
    torch = pytest.importorskip("torch")
    payload, buffer = encode([torch.arange(4, dtype=torch.int16)])
    memory = bytearray(buffer)
    got = decode([payload, memoryview(memory)])[0]
    memory[0:2] = b"\5\0"
    assert got.tolist() == [5, 1, 2, 3]


def test_a_buffer_keeps_its_tensor_alive() -> None:
    """The memory stays valid after the last reference to the tensor is gone."""
    torch = pytest.importorskip("torch")
    buffers = [encode(torch.full((1000,), number, dtype=torch.uint8))[1] for number in range(20)]
    gc.collect()
    assert [bytes(buffer) for buffer in buffers] == [bytes([number]) * 1000 for number in range(20)]


def test_a_tensor_keeps_its_frame_alive() -> None:
    """The memory stays valid after the last reference to the frame is gone."""
    torch = pytest.importorskip("torch")
    tensors = [round_trip(torch.full((1000,), number, dtype=torch.uint8)) for number in range(20)]
    gc.collect()
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))


def test_a_buffer_that_is_not_aligned_is_copied() -> None:
    """Torch gets aligned memory wherever the frame lies."""
    torch = pytest.importorskip("torch")
    payload, buffer = encode(torch.arange(3.0))
    got = decode([payload, memoryview(b"x" + bytes(buffer))[1:]])
    assert got.tolist() == [0, 1, 2]
    assert got.data_ptr() % 4 == 0


def test_tensors_arrive_detached() -> None:
    """A tensor in a graph, and a parameter, are sent as their values; the sent ones keep their graph."""
    torch = pytest.importorskip("torch")
    tensor = torch.ones(2, requires_grad=True)
    for sent in (tensor, tensor * 1, torch.nn.Parameter(torch.ones(2))):
        got = round_trip(sent)
        assert (type(got), got.requires_grad, got.tolist()) == (torch.Tensor, False, [1, 1])
        assert sent.requires_grad


def test_lazy_conjugates_and_negatives_arrive_equal() -> None:
    """Tensors whose memory is not their value, but for a flag, are sent as their value."""
    torch = pytest.importorskip("torch")
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert conjugate.is_conj()
    assert conjugate.imag.is_neg()
    assert round_trip(conjugate).tolist() == [1 - 2j, 3 + 4j]
    assert round_trip(conjugate.imag).tolist() == [-2, 4]


def test_a_default_device_does_not_move_what_is_read() -> None:
    """Tensors arrive on the CPU whatever device the process creates tensors on."""
    torch = pytest.importorskip("torch")
    frames = encode([torch.ones(2), torch.ones(0, 3)])
    with torch.device("meta"):
        assert [got.device.type for got in decode(frames)] == ["cpu", "cpu"]


def test_a_tensor_on_a_device_is_refused() -> None:
    """The error says what to call first."""
    torch = pytest.importorskip("torch")
    unsendable({"a": [torch.ones(2, device="meta")]}, "step['a'][0]: a tensor on device meta (call .cpu() first)")


def test_tensors_that_are_not_dense_are_refused() -> None:
    """Sparse, nested and quantized tensors, subclasses, and tensors without memory are named."""
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested_one = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)
        sparse = torch.eye(2).to_sparse_csr()
    unsendable([nested_one], "a sparse or nested tensor")
    unsendable([sparse], "a sparse or nested tensor (layout torch.sparse_csr)")
    unsendable([quantized], "a tensor of dtype torch.quint8")
    unsendable(
        [torch.ones(2).as_subclass(type("Special", (torch.Tensor,), {}))], "a Special (a subclass of torch.Tensor)"
    )
    unsendable([torch._efficientzerotensor((2,))], "a tensor that has no memory")


# --- Hostile messages -----------------------------------------------------------------------------------------------


@given(st.binary(max_size=200))
@settings(LIGHT, max_examples=300)
def test_garbage_is_refused_or_read_but_never_breaks(garbage: bytes) -> None:
    """Arbitrary bytes end in a value or in ProtocolError, alone and with buffers."""
    for frames in ([garbage], [garbage, b"1234"], message(garbage, entry(5, 4), b"1234")):
        with suppress(ProtocolError):
            decode(frames)


@given(st.data())
@settings(LIGHT, max_examples=200)
def test_a_damaged_message_is_refused_or_read_but_never_breaks(data: st.DataObject) -> None:
    """A valid message with bytes changed, frames dropped, swapped or cut ends in a value or in ProtocolError."""
    numpy = pytest.importorskip("numpy")
    value = {"a": numpy.arange(3), (1, 2): [numpy.float32(1), numpy.zeros((2, 0))], "b": [None, 2**40, 0.5, "é"]}
    if "torch" in sys.modules:
        value["t"] = sys.modules["torch"].ones(2)
    frames = [bytearray(frame) for frame in encode(value)]
    for _ in range(data.draw(st.integers(1, 3))):
        frame = data.draw(st.sampled_from(frames))
        if frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        frames = data.draw(st.permutations(frames))[: data.draw(st.integers(0, len(frames)))]
    with suppress(ProtocolError):
        decode([memoryview(frame) for frame in frames])


def test_no_frames_are_refused() -> None:
    """A message without a payload is no message."""
    refused([])


def test_an_empty_payload_is_refused() -> None:
    """Nothing is not a value, with buffers or without."""
    refused([b""], "incomplete input")
    refused([b"", b"x"], "no table")


def test_trailing_bytes_are_refused() -> None:
    """A payload is one value, with nothing after it."""
    refused([b"\x01\x01"], "extra data")
    refused(message(reference(ARRAY, 0) + b"\x01", entry(5, 0), b""))


@pytest.mark.parametrize("payload", [b"\x92\x01", b"\xa5abc", b"\xcd\x01", b"\xc4", b"\x81\x01"])
def test_a_cut_payload_is_refused(payload: bytes) -> None:
    """A value that ends early is not read."""
    refused([payload])


@pytest.mark.parametrize("head", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
def test_a_length_beyond_the_payload_is_refused(head: bytes) -> None:
    """A list, dict, str, bytes or ext type that claims 4 GiB is refused without memory for it."""
    refused([head + b"\xff\xff\xff\xff" + bytes(20)])


@pytest.mark.parametrize("level", [b"\x91", b"\x81\xa1k", b"\xdd\0\0\0\1", b"\x81\x91"])
def test_a_depth_bomb_is_refused(level: bytes) -> None:
    """Nesting without end is an error of ours, in values as in keys."""
    refused([level * 100_000 + b"\x01"])
    refused([level * 1000])


def test_lists_nested_in_a_key_are_bounded() -> None:
    """A key of a thousand lists in each other is read or refused, but exhausts no stack."""
    with suppress(ProtocolError):
        decode([b"\x81" + b"\x91" * 1000 + b"\x01" + b"\x01"])


def test_a_str_that_is_not_utf8_is_refused() -> None:
    """Text must be text."""
    refused([b"\xa2\xff\xfe"], "UnicodeDecodeError")


def test_a_reserved_byte_is_refused() -> None:
    """The one byte without a meaning in MessagePack stops the message."""
    refused([b"\xc1"], "FormatError")


@pytest.mark.parametrize(
    "frames", [[b"\x81\x80\x01"], message(b"\x81" + reference(ARRAY, 0) + b"\1", entry(5, 0), b"")]
)
def test_a_key_that_can_not_be_one_is_refused(frames: list[bytes]) -> None:
    """A dict or an array as a key does not hash."""
    if len(frames) > 1:
        pytest.importorskip("numpy")
    refused(frames, "unhashable")


@pytest.mark.parametrize("seconds", [struct.pack(">I", 1), struct.pack(">Q", 1), struct.pack(">Iq", 0, 1)])
def test_a_timestamp_is_refused(seconds: bytes) -> None:
    """MessagePack's own ext type, in each of its three lengths, is not in the closed set."""
    refused([msgpack.packb([msgpack.ExtType(127, seconds)]).replace(b"\x7f", b"\xff")], "max_ext_len")
    refused([msgpack.packb(msgpack.Timestamp(1, 1))], "max_ext_len")


@pytest.mark.parametrize("code", [0, 3, 127, 128, 254, 255])
def test_an_unknown_ext_code_is_refused(code: int) -> None:
    """Only arrays and tensors are known, also with a good index, and no timestamp is that short."""
    refused(message(reference(code, 0), entry(5, 1), b"x"))


@pytest.mark.parametrize("length", [0, 1, 2, 4, 16, 1000])
def test_an_index_of_another_length_is_refused(length: int) -> None:
    """The index has 3 bytes."""
    refused(message(msgpack.packb(msgpack.ExtType(ARRAY, bytes(length))), entry(5, 1), b"x"))


def test_a_reference_without_buffers_is_refused() -> None:
    """A plain message can't name a buffer."""
    refused([reference(ARRAY, 0)], "buffer index 0")


def test_an_index_out_of_range_is_refused() -> None:
    """An array must name a buffer that came."""
    refused(message(reference(ARRAY, 1), entry(5, 1), b"x"), "buffer index 1")
    refused(message(reference(ARRAY, 2**24 - 1), entry(5, 1), b"x"), "buffer index 16777215")


def test_a_buffer_used_twice_is_refused() -> None:
    """Two arrays can't share a buffer."""
    pytest.importorskip("numpy")
    refused(message(b"\x92" + reference(ARRAY, 0) * 2, entry(5, 1), b"x"), "buffer index 0, used before")


def test_a_buffer_left_unused_is_refused() -> None:
    """Every buffer must be a part of the value."""
    refused(message(b"\x01", entry(5, 1), b"x"), "a buffer that its value does not use")


def test_buffers_without_a_table_are_refused() -> None:
    """A payload without a table says nothing of its buffers."""
    refused([b"\x92\x01\x02", b"x"], "no table")


def test_a_table_of_another_length_is_refused() -> None:
    """Entries and buffers must be equally many, and the table must lie within the payload."""
    refused(message(reference(ARRAY, 0), entry(5, 1) * 2, b"x"), "bytes of table for 1 buffers")
    refused(message(reference(ARRAY, 0), entry(5, 1), b"x", b"y"))
    refused(message(reference(ARRAY, 0), entry(5, 1)[:-1], b"x"))
    refused(message(reference(ARRAY, 0), b"", b"x"))
    refused([b"\x92\xc6\xff\xff\xff\xff" + entry(5, 1) + reference(ARRAY, 0), b"x"])
    refused([b"\x92\xc6\0", b"x"])


@pytest.mark.parametrize("dtype", [20, 100, 255])
def test_an_unknown_dtype_is_refused(dtype: int) -> None:
    """A dtype outside the table has no name that could be looked up."""
    refused(message(reference(TENSOR, 0), entry(dtype, 1), b"x"), f"dtype {dtype}")


def test_a_dtype_that_numpy_lacks_is_refused() -> None:
    """An array can't be of torch's own dtypes."""
    refused(message(reference(ARRAY, 0), entry(14, 1), b"xx"), "a numpy array of dtype bfloat16")


def test_too_many_dimensions_are_refused() -> None:
    """A shape has at most 32 dimensions."""
    refused(message(reference(ARRAY, 0), entry(5, *(1,) * 33), b"x"), "33 dimensions")
    refused(message(reference(ARRAY, 0), b"\5\xff" + bytes(8 * 255), b""), "255 dimensions")


@pytest.mark.parametrize(
    ("shape", "buffer"),
    [
        ((2,), b"x"),
        ((2,), b"xxx"),
        ((), b""),
        ((0,), b"x"),
        ((1, 1), b""),
        ((2**64 - 1,), b"x"),  # minus one, if it were signed
        ((2**64 - 1, 2**64 - 1), b"x"),  # their product is 1 in 64 bits
        ((2**32, 2**32), b""),  # and this one's is 0
        ((2**63, 2), b""),
    ],
)
def test_a_shape_that_does_not_fit_its_buffer_is_refused(shape: tuple[int, ...], buffer: bytes) -> None:
    """The product of the dimensions, without overflow, must be the buffer's length."""
    for code in (ARRAY, TENSOR):
        refused(message(reference(code, 0), entry(5, *shape), buffer), f"{len(buffer)} bytes for shape")


@pytest.mark.parametrize("shape", [(0, 2**64 - 1), (0, 2**63), (0, 2**62, 2**62)])
def test_an_empty_array_of_absurd_shape_is_refused(shape: tuple[int, ...]) -> None:
    """A dimension of 0 does not excuse the others."""
    for code, package in ((ARRAY, "numpy"), (TENSOR, "torch")):
        pytest.importorskip(package)
        refused(message(reference(code, 0), entry(5, *shape), b""))


def test_msgpacks_own_ext_objects_do_not_arrive() -> None:
    """A sender that puts an ExtType or a Timestamp into a value makes a message that is refused."""
    for value in (msgpack.Timestamp(1), msgpack.ExtType(5, b"abc"), msgpack.ExtType(ARRAY, bytes(3))):
        refused([bytes(frame) for frame in encode([value])])
