"""tf.train.Example against protobuf's own encoder, given the message's description."""

from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from maxlite.data.tensorflow_example import decode_text, parse_example

FIELD = descriptor_pb2.FieldDescriptorProto
VALUES: dict[str, list[Any]] = {
    "bytes_list": [b"text", b"\xff\0"],
    "float_list": [0.5, -2.0, 0.0],
    "int64_list": [0, 1, 127, 128, 300, 2**31, 2**63 - 1, -1, -(2**63)],
}


def build_example(packed: bool = True) -> Any:
    """An empty message of that type."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")

    def add(owner: Any, name: str, number: int, kind: int, of: str | None = None, repeated: bool = False) -> Any:
        label = FIELD.LABEL_REPEATED if repeated else FIELD.LABEL_OPTIONAL
        return owner.field.add(name=name, number=number, type=kind, type_name=of, label=label)

    kinds = {"BytesList": FIELD.TYPE_BYTES, "FloatList": FIELD.TYPE_FLOAT, "Int64List": FIELD.TYPE_INT64}
    for name, kind in kinds.items():
        value = add(file.message_type.add(name=name), "value", 1, kind, repeated=True)
        if kind != FIELD.TYPE_BYTES:
            value.options.packed = packed
    feature = file.message_type.add(name="Feature")
    for number, (field, name) in enumerate(zip(VALUES, kinds, strict=True), 1):
        add(feature, field, number, FIELD.TYPE_MESSAGE, f".t.{name}")
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, FIELD.TYPE_STRING)
    add(entry, "value", 2, FIELD.TYPE_MESSAGE, ".t.Feature")
    add(features, "feature", 1, FIELD.TYPE_MESSAGE, ".t.Features.FeatureEntry", repeated=True)
    add(file.message_type.add(name="Example"), "features", 1, FIELD.TYPE_MESSAGE, ".t.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))()


@pytest.mark.parametrize("packed", [True, False])
def test_every_kind_of_feature(packed: bool) -> None:
    example = build_example(packed)
    for kind, values in VALUES.items():
        getattr(example.features.feature[kind], kind).value.extend(values)
    example.features.feature["one"].bytes_list.value.append("caf\xe9".encode())
    example.features.feature["number"].int64_list.value.append(5)
    example.features.feature["nothing"].SetInParent()
    example.features.feature["no numbers"].int64_list.SetInParent()
    one = {"one": "caf\xe9".encode(), "number": [5], "nothing": [], "no numbers": []}
    assert parse_example(example.SerializeToString()) == VALUES | one


def test_cut_anywhere() -> None:
    """Never taken for a shorter one, and never anything but ValueError."""
    example = build_example()
    for kind, values in VALUES.items():
        getattr(example.features.feature[kind], kind).value.extend(values)
    whole = example.SerializeToString()
    for size in range(len(whole)):
        with pytest.raises(ValueError, match=r"."):
            parse_example(whole[:size])


@pytest.mark.parametrize("message", [b"", b"text", b"\x08\x01", b"\x12\x00", b"\x0a\x00", b"\xff" * 20, b"\0\0"])
def test_other_bytes(message: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_example(message)


def test_text() -> None:
    assert decode_text("a", [b"caf\xc3\xa9", [1, b""], 2.5, None]) == ["caf\xe9", [1, ""], 2.5, None]
    with pytest.raises(ValueError, match="a is not UTF-8 text: byte 1 is 0xff"):
        decode_text("a", b"b\xff")
