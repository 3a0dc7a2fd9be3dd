"""The scanner agrees with json.loads on every object, and a splice changes what it was asked to and nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.body import MAX_MEMBERS, BodyError, Kind, Scan, items, scan_object
from proxy.wire.splice import Edit, apply, default, override, remove
from tests.wire.documents import KEYS, VALUES, Pairs, bodies, load, load_pairs, same

wire = settings(max_examples=100, derandomize=True, deadline=None)


def pairs_of(scan: Scan) -> list[tuple[str, object]]:
    """The members as the scan sees them, values decoded one by one."""
    found = []
    for place in scan.places:
        begin, end = place.span(2)
        found.append((place[1].decode("utf-8", "surrogatepass"), load_pairs(scan.data[begin:end])))
    return found


def check_against_json(data: bytes) -> None:
    """Equal where json.loads gives an object; else refused, or the fault is inside a value that was passed over."""
    try:
        expected = load_pairs(data)
    except (ValueError, RecursionError):
        expected = None
    try:
        scan = scan_object(data)
    except BodyError as error:
        if isinstance(expected, Pairs):
            raise AssertionError("refused what json.loads reads") from error
        return
    if expected is None:
        with pytest.raises(ValueError):
            pairs_of(scan)
    else:
        assert repr(pairs_of(scan)) == repr(list(expected))


# -- scanning ---------------------------------------------------------------------------------------------------


@wire
@given(bodies())
def test_a_scan_finds_the_members_that_json_loads_finds(data: bytes) -> None:
    scan = scan_object(data)
    expected = load_pairs(data)
    assert isinstance(expected, Pairs)
    assert repr(pairs_of(scan)) == repr(list(expected))
    keys = [key for key, _ in expected]
    assert scan.duplicates == {key.encode("utf-8", "surrogatepass") for key in keys if keys.count(key) > 1}
    assert set(scan.members) == {key.encode("utf-8", "surrogatepass") for key in keys}


@wire
@given(bodies())
def test_a_scan_refuses_every_beginning_of_a_body(data: bytes) -> None:
    whole = data.rstrip()
    for cut in range(len(whole)):
        with pytest.raises(BodyError):
            scan_object(whole[:cut])


@wire
@given(
    bodies(),
    st.integers(0, 400),
    st.one_of(st.just(b""), st.binary(max_size=3), st.sampled_from(list(b'"\\{}[],:'))),
)
def test_a_damaged_body_is_judged_like_json_loads_does(data: bytes, at: int, patch: bytes | int) -> None:
    at %= len(data)
    check_against_json(data[:at] + (bytes([patch]) if isinstance(patch, int) else patch) + data[at + 1 :])


@wire
@given(
    st.one_of(
        st.binary(max_size=60),
        st.text(alphabet='{}[]":,\\ua01-.eEtrufalsnNIy \n', max_size=60).map(str.encode),
    )
)
def test_no_bytes_crash_the_scan(data: bytes) -> None:
    check_against_json(data)
    check_against_json(b'{"a":' + data + b"}")


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("{}", []),
        (" \n{ \t} \r\n", []),
        ("\ufeff{}", []),
        ('\ufeff {"a":1}', ["a"]),
        ('{"a":1}', ["a"]),
        ('{"a":{"b":[1,{"c":"]}"}]},"d":"}"}', ["a", "d"]),
        ('{"a":"\\\\","b":"\\\\\\""}', ["a", "b"]),
        ('{"a\\"b":1,"c\\\\":2}', ['a"b', "c\\"]),
        ('{"mod\\u0065l":"x"}', ["model"]),
        ('{"\\ud800":1}', ["\ud800"]),
        ('{"a":NaN,"b":-Infinity,"c":123456789012345678901234567890}', ["a", "b", "c"]),
        ('{"a":1,"a":2,"a":3}', ["a", "a", "a"]),
        ('{"":""}', [""]),
    ],
)
def test_these_are_objects(text: str, keys: list[str]) -> None:
    scan = scan_object(text.encode())
    assert [place[1].decode("utf-8", "surrogatepass") for place in scan.places] == keys


@pytest.mark.parametrize(
    "data",
    [
        *(
            b"",
            b"  ",
            b"null",
            b"[]",
            b'"a"',
            b"1",
            b"{",
            b"}",
            b"{{}}",
            b'{"a"}',
            b'{"a":}',
            b'{"a":1',
            b'{"a":1,}',
        ),
        *(
            b"{,}",
            b'{"a":1,,"b":2}',
            b'{"a":1 "b":2}',
            b'{"a" 1}',
            b"{'a':1}",
            b"{a:1}",
            b'{"a":1}}',
            b'{"a":1}{}',
        ),
        *(
            b'{"a":01}',
            b'{"a":+1}',
            b'{"a":1.}',
            b'{"a":.5}',
            b'{"a":1e}',
            b'{"a":--1}',
            b'{"a":nan}',
            b'{"a":tru}',
        ),
        *(
            b'{"a":"b',
            b'{"a":"b\\"}',
            b'{"a":[1',
            b'{"a":[1}',
            b'{"a":{"b":1]',
            b'{"a":\\"b\\"}',
            b'{"a":1}\0',
        ),
        *(
            b'{"a\n":1}',
            b'{"\xff":1}',
            b'{"a\\x":1}',
            b'{"\\u00":1}',
            b'{/**/"a":1}',
            b'{"a":1//\n}',
            b'{"a":[/*"*/]}',
        ),
        *(
            '{"a":1}'.encode("utf-16"),
            '{"a":1}'.encode("utf-16-le"),
            b"\xff\xfe{}",
            b"\0",
            b'\xef\xbb\xbf\xef\xbb\xbf{"a":1}',
        ),
    ],
)
def test_these_are_not(data: bytes) -> None:
    with pytest.raises(BodyError) as caught:
        scan_object(data)
    assert caught.value.param is None or data in (b'{"\xff":1}', b'{"a\n":1}', b'{"a\\x":1}', b'{"\\u00":1}')


@pytest.mark.parametrize("layers", [1, 11, 12, 13, 14, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{}, "\\"]", {"k":[', "]}]")])
def test_any_depth_is_crossed_and_what_follows_is_found(layers: int, opening: str, closing: str) -> None:
    value = opening * layers + "1" + closing * layers
    scan = scan_object(f'{{"first":1,"deep":{value} ,"last":2}}'.encode())
    assert scan.raw(b"deep") == value.encode()
    assert scan.raw(b"last") == b"2"
    with pytest.raises(BodyError):
        scan_object(f'{{"deep":{value[:-1]}'.encode())


@pytest.mark.parametrize("unit", ["[],", '{"a":"}"},', "[[[1]]],", '"]",', '"\\"",', "1,"])
@pytest.mark.parametrize("count", [1, 1000, 4095, 4096, 4097, 9000])
def test_depth_is_counted_right_over_many_tokens(unit: str, count: int) -> None:
    value = "[" * 15 + unit * count + "0" + "]" * 15
    assert scan_object(f'{{"deep":{value},"last":2}}'.encode()).raw(b"deep") == value.encode()


@pytest.mark.parametrize("after", [0, 4096, 9000])
@pytest.mark.parametrize("inside", [0, 4070, 4075, 4076, 4077, 4096, 9000])
def test_a_deep_value_ends_at_its_own_bracket(inside: int, after: int) -> None:
    value = "[" * 20 + '"a",' * inside + "0" + "]}" * 10
    many = '"a",' * after
    scan = scan_object(f'{{"deep":{value},"list":[{many}[]],"last":2}}'.encode())
    assert scan.raw(b"deep") == value.encode()
    assert scan.raw(b"last") == b"2"


def test_a_long_run_of_anything_is_no_trouble() -> None:
    for part in ("\\", '\\"', "\\\\", "x", " ", "\\u0041", "é"):
        text = part * (20_000 if part != "\\" else 0)
        scan = scan_object(f'{{"{text}":"{text}","m":["{text}"],"last":1}}'.encode())
        assert scan.raw(b"last") == b"1"
        assert scan.raw(b"m") == f'["{text}"]'.encode()


def test_the_number_of_fields_is_bounded() -> None:
    def body(key: str, count: int) -> bytes:
        return ("{" + ",".join(f'"{key}{n}":{n}' for n in range(count)) + "}").encode()

    for key in ("k", "\\u0041"):
        assert len(scan_object(body(key, MAX_MEMBERS)).members) == MAX_MEMBERS
        for more in (1, 2, 5000):
            with pytest.raises(BodyError, match="more than"):
                scan_object(body(key, MAX_MEMBERS + more))


# -- reading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"model":"a","model":"b"}',
        '{"model":"a","mod\\u0065l":"b"}',
        '{"\\u006dodel":"a","x":{"model":1},"model":null}',
        '{"mod\\u0065l":"a","\\u006dodel":"b"}',
        '{"model":"a","y":"\\"","model":"a"}',
        '{"model":"a","deep":' + "[" * 20 + "]" * 20 + ',"model":"a"}',
    ],
)
def test_a_second_model_is_an_error_that_names_it_however_it_is_spelled(text: str) -> None:
    scan = scan_object(text.encode())
    with pytest.raises(BodyError, match="more than once") as caught:
        scan.get_str(b"model")
    assert caught.value.param == "model"
    with pytest.raises(BodyError):
        apply(scan, [override("model", "c")])
    assert apply(scan, [override("other", 1)]).startswith(text[:-1].encode())


def test_another_key_may_repeat() -> None:
    data = b'{"x":1,"model":"a","x":2}'
    assert apply(scan_object(data), [override("model", "b")]) == b'{"x":1,"model":"b","x":2}'


@wire
@given(VALUES)
def test_getters_read_a_value_as_json_loads_does_or_name_the_field(text: str) -> None:
    data = f'{{"k": {text} }}'.encode()
    scan = scan_object(data)
    value = load(data)["k"]  # type: ignore[index]
    for getter, kinds in ((scan.get_str, str), (scan.get_bool, bool), (scan.get_int, int)):
        try:
            got = getter(b"k")
        except BodyError:
            lone = isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value)
            assert lone or not isinstance(value, kinds) or (kinds is int and isinstance(value, bool))
        else:
            assert got == value or kinds is not str
    kind = scan.kind(b"k")
    expected = {str: Kind.STRING, list: Kind.ARRAY, dict: Kind.OBJECT, type(None): Kind.NULL}
    if isinstance(value, bool):
        assert kind is (Kind.TRUE if value else Kind.FALSE)
    else:
        assert kind is expected.get(type(value), Kind.NUMBER)


@pytest.mark.parametrize(
    ("getter", "text", "value"),
    [
        *(
            ("get_str", text, value)
            for text, value in (("null", None), ('"é\\n"', "é\n"), ('"\\ud83d\\ude00"', "😀"))
        ),
        *(("get_bool", text, True) for text in ("true", '"true"', '"ON"', "1", "1.0", '"y"')),
        *(("get_bool", text, False) for text in ("false", '"False"', "0", "-0", "0.0", '"no"')),
        *(("get_int", text, 100) for text in ("100", "100.0", '"100"', "1e2", '" 100 "', '"+100"')),
        *(("get_int", text, int(text)) for text in ("-1", "0", "1" * 40)),
        *((getter, "null", None) for getter in ("get_bool", "get_int", "get_object")),
    ],
)
def test_values_are_taken_as_pydantic_takes_them(getter: str, text: str, value: object) -> None:
    got = getattr(scan_object(f'{{"k":{text}}}'.encode()), getter)(b"k")
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("getter", "text", "message"),
    [
        ("get_str", "1", "k must be a string, not a number"),
        ("get_str", "[]", "k must be a string, not an array"),
        ("get_str", "true", "k must be a string, not true"),
        ("get_str", '"\\ud800"', "k is not valid Unicode"),
        ("get_str", '"a\nb"', "k is not valid JSON"),
        ("get_str", '"\\x"', "k is not valid JSON"),
        ("get_bool", '"maybe"', "k must be a boolean, not a string"),
        ("get_bool", "2", "k must be a boolean, not a number"),
        ("get_bool", "NaN", "k must be a boolean"),
        ("get_bool", "{}", "k must be a boolean, not an object"),
        ("get_int", "1.5", "k must be an integer, not a number"),
        ("get_int", "NaN", "k must be an integer"),
        ("get_int", "1e999", "k must be an integer"),
        ("get_int", "true", "k must be an integer, not true"),
        ("get_int", '"1_0"', "k must be an integer"),
        ("get_int", '"١"', "k must be an integer"),
        ("get_int", "1" * 5000, "k is not valid JSON"),
        ("get_int", '"' + "1" * 5000 + '"', "k must be an integer"),
        ("get_object", "[]", "k must be an object, not an array"),
    ],
)
def test_a_wrong_value_is_an_error_that_says_what_it_must_be(getter: str, text: str, message: str) -> None:
    scan = scan_object(f'{{"k":{text}}}'.encode())
    with pytest.raises(BodyError, match=message) as caught:
        getattr(scan, getter)(b"k")
    assert caught.value.param == "k"


def test_raw_bytes_that_are_no_utf8_are_an_error_where_they_are_read_only() -> None:
    scan = scan_object(b'{"k":"\xff","l":"\xff","m":1}')
    assert scan.get_int(b"m") == 1
    with pytest.raises(BodyError):
        scan.get_str(b"k")


@wire
@given(st.lists(VALUES, max_size=5))
def test_items_are_the_elements_of_an_array(values: list[str]) -> None:
    text = "[ " + " , ".join(values) + "]"
    data = f'{{"é\\"":"\\\\","list":{text}, "after":[1]}}'.encode()
    scan = scan_object(data)
    span = scan.span(b"list")
    assert span is not None
    found = [data[begin:end].decode() for begin, end in items(data, span)]
    shallow = next((n for n, value in enumerate(values) if _depth(value) > 12), len(values))
    assert found[:shallow] == values[:shallow]
    assert len(found) <= len(values)


def _depth(text: str) -> int:
    depth, value = 0, [json.loads(text)]
    while value := [v for v in value if isinstance(v, list | dict)]:
        depth += 1
        value = [inner for v in value for inner in (v.values() if isinstance(v, dict) else v)]
    return depth


# -- splicing ---------------------------------------------------------------------------------------------------

PATHS = st.sampled_from(
    [("model",), ("a",), ("b",), ("é",), ("new",), ("a", "x"), ("new", "y", "z"), ("b", "é")]
)
JSON_VALUES = st.sampled_from([None, True, 0, 1.5, "text", 'quo"te\\', [1, [2]], {}, {"x": {"y": 1}}])
EDITS = st.lists(
    st.one_of(
        st.builds(override, PATHS, JSON_VALUES),
        st.builds(default, PATHS, JSON_VALUES),
        st.builds(remove, PATHS),
    ),
    max_size=4,
)


class NotAnObject(Exception):
    pass


def merge(document: dict[str, object], edit: Edit, path: tuple[bytes, ...]) -> None:
    """What an edit means, on a parsed document."""
    key = path[0].decode()
    present = document.get(key)
    if len(path) == 1:
        if edit.value is None:
            document.pop(key, None)
        elif not edit.default or present is None:
            document[key] = json.loads(edit.value)
        return
    if present is None:
        if edit.value is None:
            return
        present = document[key] = {}
    if isinstance(present, dict):
        merge(present, edit, path[1:])
    elif not edit.default:
        raise NotAnObject


@wire
@given(bodies(), EDITS)
def test_edits_do_to_the_bytes_what_a_merge_does_to_the_document(data: bytes, edits: list[Edit]) -> None:
    scan = scan_object(data)
    document = load(data)
    assert isinstance(document, dict)
    try:
        for edit in edits:
            merge(document, edit, edit.path)
    except NotAnObject:
        with pytest.raises(BodyError):
            apply(scan, edits)
        return
    try:
        result = apply(scan, edits)
    except BodyError as error:
        if "more than once" not in error.message:
            raise
        return
    assert same(load(result), document)
    edited = {edit.path[0] for edit in edits}
    for key in set(scan.members) - edited - scan.duplicates:
        assert scan_object(result).raw(key) == scan.raw(key)
    if not edits:
        assert result is data


@wire
@given(bodies(), JSON_VALUES, st.data())
def test_replacing_a_value_changes_no_other_byte(data: bytes, value: object, choice: st.DataObject) -> None:
    scan = scan_object(data)
    keys = sorted(set(scan.members) - scan.duplicates)
    if not keys:
        return
    key = choice.draw(st.sampled_from(keys))
    begin, end = scan.members[key].span(2)
    edit = Edit((key,), json.dumps(value).encode())
    assert edit.value is not None
    assert apply(scan, [edit]) == data[:begin] + edit.value + data[end:]


@wire
@given(bodies(), st.booleans())
def test_a_new_member_goes_behind_the_last_and_changes_no_other_byte(data: bytes, nested: bool) -> None:
    scan = scan_object(data)
    result = apply(scan, [override("fresh.inner" if nested else "fresh", 1)])
    added = b'"fresh":{"inner":1}' if nested else b'"fresh":1'
    if not scan.places:
        assert result == data.replace(b"{", b"{" + added, 1)
    else:
        end = scan.places[-1].span(2)[1]
        assert result == data[:end] + b"," + added + data[end:]


@wire
@given(bodies(), st.data())
def test_removing_members_leaves_the_others_as_they_were(data: bytes, choice: st.DataObject) -> None:
    scan = scan_object(data)
    keys = sorted(set(scan.members) - scan.duplicates)
    gone = set(choice.draw(st.lists(st.sampled_from(keys)))) if keys else set()
    result = apply(scan, [Edit((key,), None) for key in gone])
    left = scan_object(result)
    assert [place[1] for place in left.places] == [place[1] for place in scan.places if place[1] not in gone]
    old = [data[slice(*place.span(2))] for place in scan.places if place[1] not in gone]
    assert [result[slice(*place.span(2))] for place in left.places] == old


@wire
@given(bodies(KEYS.filter(lambda key: json.loads(key) != "model")), st.sampled_from(["x", "é", 'q"']))
def test_setting_twice_is_setting_once(data: bytes, name: str) -> None:
    once = apply(scan_object(data), [override("model", name)])
    assert apply(scan_object(once), [override("model", name), default("model", "other")]) is once
    assert scan_object(once).get_str(b"model") == name


@pytest.mark.parametrize(
    ("before", "edits", "after"),
    [
        ("{}", [override("a", 1)], '{"a":1}'),
        (" { } ", [override("a", 1), override("b", 2)], ' {"a":1,"b":2 } '),
        ('{\n  "a": 1\n}\n', [override("b", "é")], '{\n  "a": 1,"b":"\\u00e9"\n}\n'),
        ('{"a":1, "b":2 ,"c":3}', [remove("b")], '{"a":1,"c":3}'),
        ('{"a":1, "b":2 ,"c":3 }', [remove("c")], '{"a":1, "b":2 }'),
        ('{"a":1, "b":2 ,"c":3 }', [remove("b"), remove("c")], '{"a":1 }'),
        ('{"a":1, "b":2 ,"c":3 }', [remove("a"), remove("c")], '{ "b":2 }'),
        ('{"a":1, "b":2 ,"c":3 }', [override("b", 0), remove("a"), remove("c")], '{ "b":0 }'),
        ('{"a":1 }', [remove("a")], "{ }"),
        ('{"a":1}', [remove("a"), override("b", 2)], '{"b":2}'),
        ('{"a":1,"b":2}', [remove("b"), override("c", 3), override("a", 0)], '{"a":0,"c":3}'),
        ('{"a":null}', [default("a", 1)], '{"a":1}'),
        ('{"a":0}', [default("a", 1), default("a", 2)], '{"a":0}'),
        ("{}", [default("a", 1), default("a", 2)], '{"a":1}'),
        ("{}", [override("a.b.c", 1), override("a.b.d", 2)], '{"a":{"b":{"c":1,"d":2}}}'),
        ('{"a": null}', [default("a.b", 1)], '{"a": {"b":1}}'),
        ('{"a": {"b" : 2, "c":3}}', [default("a.b", 1), override("a.c", 4)], '{"a": {"b" : 2, "c":4}}'),
        ('{"a": [1]}', [default("a.b", 1)], '{"a": [1]}'),
        ('{"a": 1}', [remove("b"), remove("c.d")], '{"a": 1}'),
        ('{"mod\\u0065l":"x","k":"\\""}', [override("model", "y")], '{"mod\\u0065l":"y","k":"\\""}'),
        ('{"a.b":1}', [override(("a.b",), 2)], '{"a.b":2}'),
        ('{"n":12345678901234567890123,"x":NaN,"s":"\\ud800"}', [override("m", 1)],
         '{"n":12345678901234567890123,"x":NaN,"s":"\\ud800","m":1}'),
        ("\ufeff{}", [override("a", 1)], '\ufeff{"a":1}'),
    ],
)  # fmt: skip
def test_a_splice_looks_like_this(before: str, edits: list[Edit], after: str) -> None:
    data = before.encode()
    result = apply(scan_object(data), edits)
    assert result.decode() == after
    assert result is data or before != after


@pytest.mark.parametrize(
    ("before", "edit", "param"),
    [
        ('{"a":[1]}', override("a.b", 1), "a"),
        ('{"a":{"b":1,"\\u0062":2}}', override("a.b", 1), "a.b"),
        ('{"a":{"b":1}}', override("a.b.c", 1), "a.b"),
        ('{"a":{"b":1]}', override("a.b", 1), "a"),
    ],
)
def test_an_edit_that_cannot_be_made_names_its_place(before: str, edit: Edit, param: str) -> None:
    with pytest.raises(BodyError) as caught:
        apply(scan_object(before.encode()), [edit])
    assert caught.value.param == param


def test_an_edit_of_nothing_is_a_mistake() -> None:
    with pytest.raises(ValueError):
        override((), 1)
