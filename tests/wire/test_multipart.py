"""Uploads: the model of a form is found where every reader finds it, and replaced without touching the file."""

from __future__ import annotations

import io
from email.parser import BytesParser
from email.policy import HTTP

import pytest
from aiohttp import FormData, payload_type
from aiohttp.payload import Payload
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.body import BodyError
from proxy.wire.multipart import MAX_PARTS, Form, read_form

BOUNDARY = "----bound.42"
TYPE = f'multipart/form-data; boundary="{BOUNDARY}"'


def part(content: bytes | str, disposition: str = 'form-data; name="model"', *more: str) -> bytes:
    text = content.encode() if isinstance(content, str) else content
    head = "".join(f"{line}\r\n" for line in (f"Content-Disposition: {disposition}", *more))
    return f"--{BOUNDARY}\r\n{head}\r\n".encode() + text + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


FILE = part(
    bytes(range(256)) * 20 + b"\r\n--\r\n--other\r\n",
    'form-data; name="file"; filename="a;b.wav"',
    "Content-Type: audio/wav",
)


def reference(content_type: str, data: bytes) -> dict[str, bytes]:
    """The fields as the standard library reads them."""
    message = BytesParser(policy=HTTP).parsebytes(
        b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + data
    )
    found = {}
    for item in message.iter_parts():  # type: ignore[attr-defined]
        found[item.get_param("name", header="content-disposition")] = item.get_payload(decode=True)
    return found


def test_fields_are_read_and_the_file_is_left_alone() -> None:
    data = form(
        FILE, part("whisper"), part("TRUE", "form-data; name=stream"), part("", 'form-data; name="prompt"')
    )
    found = read_form(TYPE, data)
    assert [item.name for item in found.parts] == [b"file", b"model", b"stream", b"prompt"]
    assert [item.file for item in found.parts] == [True, False, False, False]
    assert (found.get_str("model"), found.get_bool("stream"), found.get_str("prompt")) == (
        "whisper",
        True,
        "",
    )
    assert (found.get_str("language"), found.get_bool("language")) == (None, False)


def test_a_new_model_replaces_the_old_one_and_nothing_else() -> None:
    data = form(FILE, part("whisper"), part("de", 'form-data; name="language"'))
    assert read_form(TYPE, data).replace("model", "größer") == form(
        FILE, part("größer"), part("de", 'form-data; name="language"')
    )


def test_a_model_that_is_not_there_is_put_first() -> None:
    result = read_form(TYPE, form(FILE)).replace("model", "m")
    assert result == form(part("m"), FILE)
    assert read_form(TYPE, form()).replace("model", "m") == form(part("m"))


@pytest.mark.parametrize("value", ["a\r\nb", "a\n", f"x--{BOUNDARY}"])
def test_a_value_that_would_break_the_form_is_never_written(value: str) -> None:
    with pytest.raises(ValueError):
        read_form(TYPE, form(part("a"))).replace("model", value)


@pytest.mark.parametrize(
    "content_type",
    [
        f"multipart/form-data; boundary={BOUNDARY}",
        f"Multipart/Form-Data;boundary={BOUNDARY}",
        f'multipart/form-data; charset=UTF-8 ; Boundary="{BOUNDARY}"; ',
    ],
)
def test_the_boundary_is_found_in_any_spelling(content_type: str) -> None:
    assert read_form(content_type, form(part("a"))).get_str("model") == "a"


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/json",
        "multipart/mixed; boundary=x",
        "multipart/form-data-x; boundary=x",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary="a',
        'multipart/form-data; boundary="a\\b"',
        "multipart/form-data; boundary=" + "x" * 300,
        "multipart/form-data; boundary*=utf-8''x; boundary=x",
        f"multipart/form-data; boundary={BOUNDARY}; boundary={BOUNDARY}",
        f"multipart/form-data; boundary={BOUNDARY}; charset=utf-16",
        "multipart/form-data; boundary=\udcff",
    ],
)
def test_a_content_type_without_a_plain_boundary_is_refused(content_type: str) -> None:
    with pytest.raises(BodyError):
        read_form(content_type, form(part("a")))


@pytest.mark.parametrize(
    "other",
    [
        part("b"),
        part("b", "form-data; name=model"),
        part("b", 'FORM-DATA ;name = "model"'),
        part("b", "form-data; name*=utf-8''model"),
        part("b", 'form-data; name="x"; name="model"'),
        part("b", 'form-data; name="x"; name*=model'),
        part("b", 'form-data; name="mo\\del"'),
        part("b", 'form-data; name="x', 'y"; name="model"'),
        part("b", 'form-data; name="x"', 'Content-Disposition: form-data; name="model"'),
        part("b", 'form-data; name="model"', 'content-disposition: form-data; name="x"'),
        part("b", 'form-data; x="', ' "; name="model"'),
        part("b", 'form-data; NAME="model"'),
        part("b", 'form-data; name="model"; filename=""'),
        part("b", 'attachment; name="model"'),
        part("b").replace(b"\r\n", b"\n"),
        part(
            "b\n--" + BOUNDARY + '\nContent-Disposition: form-data; name="model"\n\nc', 'form-data; name="x"'
        ),
        part(
            "b\n--" + BOUNDARY + '\r\nContent-Disposition: form-data; name="x"\r\n\r\nc',
            'form-data; name="x"',
        ),
        part("b").replace(b"\r\n", b" \t\r\n", 1),
        part("b").replace(b"\r\n", b"junk\r\n", 1),
        part("b", 'form-data; name="x"', "Content-Transfer-Encoding: base64"),
    ],
)
def test_no_second_model_slips_by(other: bytes) -> None:
    for data in (form(part("a"), other), form(other, part("a"))):
        with pytest.raises(BodyError):
            read_form(TYPE, data).get_str("model")


@pytest.mark.parametrize(
    "data",
    [
        *(
            b"",
            b"x",
            b"{}",
            form(part("a"))[:-8],
            form(part("a"))[:30],
            b"junk" + form(part("a")),
            form(part("a")) + b"junk",
        ),
        *(
            form(part("a")) + form(part("b")),
            form(part("a")).replace(b"\r\n\r\n", b"\r\n"),
            form(b"\r\n", b"x"),
        ),
        form(f"--{BOUNDARY}\r\n\r\na\r\n".encode()),
        form(part("a", 'form-data; name="model"', "x" * 9000 + ": y")),
        form(part("a", 'form-data; name="model"', "no colon")),
        form(part("a", 'form-data; name="mo\0del"')),
        form(part("a")[:-2].removesuffix(b"a")),
        form(f"--{BOUNDARY}\r\nContent-Disposition: form-data; name=x\r\n".encode(), part("a")),
        form(part("a", "form-data")),
        form(part("a", 'form-data; name="model" garbage')),
        form(part("a", 'form-data; name="model')),
    ],
)
def test_a_malformed_form_is_refused(data: bytes) -> None:
    with pytest.raises(BodyError):
        read_form(TYPE, data)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (part("a", 'form-data; name="model"; filename="m.txt"'), "not a file"),
        (part(b"\xff"), "not valid UTF-8"),
        (part(b"x" * 70_000), "too long"),
    ],
)
def test_a_model_that_is_no_text_is_named(item: bytes, message: str) -> None:
    with pytest.raises(BodyError, match=message) as caught:
        read_form(TYPE, form(item)).get_str("model")
    assert caught.value.param == "model"


def test_the_number_of_parts_is_bounded() -> None:
    many = [part("x", f'form-data; name="x{n}"') for n in range(MAX_PARTS)]
    assert len(read_form(TYPE, form(*many)).parts) == MAX_PARTS
    with pytest.raises(BodyError, match="more than"):
        read_form(TYPE, form(*many, FILE))


def test_every_beginning_of_a_form_is_refused() -> None:
    data = form(part("a"), part(b"\0\r\n\xff" * 5, 'form-data; name="file"; filename="f"'))
    for cut in range(len(data) - 2):
        with pytest.raises(BodyError):
            read_form(TYPE, data[:cut])


class Sink:
    """Collects what aiohttp writes of a form."""

    def __init__(self) -> None:
        self.data = io.BytesIO()

    async def write(self, chunk: bytes) -> None:
        self.data.write(chunk)


async def test_a_form_as_aiohttp_writes_it_is_read() -> None:
    fields = FormData()
    fields.add_field("file", b"RIFF\r\n\r\n--x", filename='a "b" ü.wav', content_type="audio/wav")
    fields.add_field("model", "whisper")
    fields.add_field("temperature", "0.2")
    payload = fields()
    assert isinstance(payload, Payload)
    assert payload_type is not None
    sink = Sink()
    await payload.write(sink)  # type: ignore[arg-type]
    found = read_form(payload.headers["content-type"], sink.data.getvalue())
    assert (found.get_str("model"), found.get_str("temperature")) == ("whisper", "0.2")
    assert [item.file for item in found.parts] == [True, False, False]


NAMES = st.sampled_from(["model", "file", "stream", "é", "a b", "x;y", "q=1"])


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    st.dictionaries(NAMES, st.binary(max_size=40).filter(lambda data: b"--" not in data), min_size=1),
    st.booleans(),
)
def test_parts_are_those_that_the_standard_library_finds(fields: dict[str, bytes], quoted: bool) -> None:
    data = form(*(part(content, f'form-data; name="{name}"') for name, content in fields.items()))
    found = read_form(TYPE if quoted else TYPE.replace('"', ""), data)
    assert {item.name.decode(): data[item.begin : item.end] for item in found.parts} == fields
    replaced = read_form(TYPE, found.replace("model", "new")) if "model" in fields else found
    assert isinstance(replaced, Form)
    assert [item.name for item in replaced.parts] == [item.name for item in found.parts]


def test_the_standard_library_reads_what_was_replaced() -> None:
    data = read_form(TYPE, form(FILE, part("whisper"))).replace("model", "other")
    assert reference(TYPE, data)["model"] == b"other"


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.integers(0, 1000), st.binary(max_size=4), st.text(max_size=80))
def test_no_bytes_crash_the_reader(at: int, patch: bytes, content_type: str) -> None:
    data = form(part("a"), FILE[:200] + b"\r\n")
    at %= len(data)
    for kind in (TYPE, content_type, f"multipart/form-data; {content_type}"):
        try:
            read_form(kind, data[:at] + patch + data[at + 1 :]).get_str("model")
        except BodyError:
            continue
