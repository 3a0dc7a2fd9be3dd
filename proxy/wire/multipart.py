"""Form fields of a multipart/form-data upload, read and replaced as bytes; the file is looked through, not copied.

Rules
1. Strict where two readers could disagree about what the `model` is: CRLF line ends, no folded headers, one
   disposition and one name a part, a name without escapes or RFC 5987 spelling, UTF-8, no transfer encoding. What
   real clients send has none of these. The boundary anywhere but in a delimiter is malformed.
2. A field that is read must be there once, and be no file.
3. Linear time: the boundary is searched, headers are bounded in size, parts in number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from proxy.wire import patterns
from proxy.wire.body import LAX_TRUE, BodyError

MAX_PARTS = 1000
"""Fields and files in one form; Starlette's limit too."""
MAX_PART_HEADER = 8192
"""Bytes of headers of one part."""
MAX_VALUE = 65536
"""Bytes of a field that is read."""

_TOKEN = rb"[A-Za-z0-9!#$%&'*+.^_`|~\-]++"
_QUOTED = rb'"(?:[^"\\\r\n]|\\[^\r\n])*+"'
_PARAM = patterns.compile(
    rb"[ \t]*+;[ \t]*+(?:(" + _TOKEN + rb")=(?:(" + _TOKEN + rb")|(" + _QUOTED + rb"))|(?=[ \t]*+(?:;|\Z)))"
)
_LINE = re.compile(rb"(" + _TOKEN + rb"):[ \t]*+([^\r\n\0]*+)\Z")
_TYPE = re.compile(rb"[ \t]*+multipart/form-data(?=[ \t]*+(?:;|\Z))", re.IGNORECASE)
_FORM_DATA = re.compile(rb"form-data(?=[ \t]*+(?:;|\Z))", re.IGNORECASE)
_BOUNDARY = re.compile(rb"[\x20-\x7e]{1,200}(?<! )\Z")
_DELIMITER_END = patterns.compile(rb"[ \t]*+\r\n|--[ \t]*+(?:(?:\r\n)++|\Z)")


@dataclass(frozen=True, slots=True)
class Part:
    """One part. name: as sent. file: has a file name. begin, end: offsets of its content."""

    name: bytes
    file: bool
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Form:
    """A multipart body and where its parts are."""

    data: bytes
    boundary: bytes
    parts: tuple[Part, ...]

    def get_str(self, name: str) -> str | None:
        """The text of the field; None if it is not there."""
        part = self._field(name)
        if part is None:
            return None
        if part.end - part.begin > MAX_VALUE:
            raise BodyError(f"{name} is too long", name)
        try:
            return self.data[part.begin : part.end].decode()
        except UnicodeDecodeError:
            raise BodyError(f"{name} is not valid UTF-8", name) from None

    def get_bool(self, name: str) -> bool:
        """Whether the field says yes in a way that vLLM's pydantic understands."""
        return (self.get_str(name) or "").strip().lower() in LAX_TRUE

    def replace(self, name: str, value: str) -> bytes:
        """The body with the field set to `value`; a field that is not there becomes the first part."""
        text = value.encode()
        if b"\r" in text or b"\n" in text or self.boundary in text:
            raise ValueError(f"not a form value for this body: {value!r}")
        view = memoryview(self.data)
        part = self._field(name)
        if part is not None:
            return b"".join((view[: part.begin], text, view[part.end :]))
        head = b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n' % (self.boundary, name.encode())
        return b"".join((head, text, b"\r\n", view))

    def _field(self, name: str) -> Part | None:
        wanted = name.encode()
        found = [part for part in self.parts if part.name == wanted]
        if len(found) > 1:
            raise BodyError(f"{name} is given more than once", name)
        if found and found[0].file:
            raise BodyError(f"{name} must be a form field, not a file", name)
        return found[0] if found else None


def read_form(content_type: str, data: bytes) -> Form:
    """The parts of `data`; BodyError if it is not the form that `content_type` announces."""
    boundary = _boundary(content_type)
    delimiter = b"--" + boundary
    parts: list[Part] = []
    at = data.find(delimiter)
    if at < 0 or data[:at].strip(b"\r\n"):
        raise _malformed("it does not begin with the boundary")
    while True:
        line = _DELIMITER_END.match(data, at + len(delimiter))
        if line is None:
            raise _malformed("a boundary is not alone on its line")
        if line[0].startswith(b"--"):
            break
        if len(parts) == MAX_PARTS:
            raise BodyError(f"the form has more than {MAX_PARTS} parts")
        head_end = data.find(b"\r\n\r\n", line.end(), line.end() + MAX_PART_HEADER)
        at = data.find(delimiter, line.end())
        if at < 0:
            raise _malformed("it ends before its last boundary")
        if head_end < 0 or data[at - 2 : at] != b"\r\n" or at - 2 < head_end + 4:
            raise _malformed("a part has no headers, or no end")
        name, file = _disposition(data[line.end() : head_end])
        parts.append(Part(name, file, head_end + 4, at - 2))
    if data[line.end() :].strip(b"\r\n"):
        raise _malformed("something follows its last boundary")
    return Form(data, boundary, tuple(parts))


def _boundary(content_type: str) -> bytes:
    header = content_type.encode("utf-8", "surrogateescape")
    kind = _TYPE.match(header)
    if kind is None:
        raise BodyError("the content type must be multipart/form-data")
    params = _params(header, kind.end())
    charset = params.get(b"charset", b"utf-8").lower()
    boundary = params.get(b"boundary", b"")
    if charset not in (b"utf-8", b"us-ascii"):
        raise BodyError("a form must be in UTF-8")
    if b"boundary*" in params or b"\\" in boundary or not _BOUNDARY.match(boundary):
        raise BodyError("the content type has no usable boundary")
    return boundary


def _disposition(head: bytes) -> tuple[bytes, bool]:
    """Name of a part, and whether it is a file, from its headers."""
    headers: dict[bytes, bytes] = {}
    for line in head.split(b"\r\n"):
        match = _LINE.match(line)
        if match is None:
            raise _malformed("a part's header cannot be read")
        key = match[1].lower()
        if key in headers:
            raise _malformed("a part has the same header twice")
        headers[key] = match[2]
    disposition = headers.get(b"content-disposition", b"")
    kind = _FORM_DATA.match(disposition)
    if kind is None:
        raise _malformed("a part is not form-data")
    params = _params(disposition, kind.end())
    name = params.get(b"name")
    if name is None or b"name*" in params or b"\\" in name:
        raise _malformed("a part has no plain name")
    if headers.get(b"content-transfer-encoding", b"binary").strip().lower() not in (
        b"binary",
        b"8bit",
        b"7bit",
    ):
        raise _malformed("a part has a transfer encoding")
    return name, b"filename" in params or b"filename*" in params


def _params(header: bytes, at: int) -> dict[bytes, bytes]:
    """The parameters behind `at`, quotes taken off, escapes left."""
    params: dict[bytes, bytes] = {}
    while match := _PARAM.match(header, at):
        at = match.end()
        if match[1] is None:
            continue
        key = match[1].lower()
        if key in params:
            raise _malformed("a header has the same parameter twice")
        params[key] = match[2] if match[2] is not None else match[3][1:-1]
    if header[at:].strip(b" \t"):
        raise _malformed("a header's parameters cannot be read")
    return params


def _malformed(why: str) -> BodyError:
    return BodyError(f"the form is malformed: {why}")
