"""Trace files of both formats are read; others are refused with the line that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.simulate.files import BadTrace, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
MOONCAKE = '{"timestamp":%d,"input_length":%d,"output_length":%d,"hash_ids":%s}\n'


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_mooncake_trace_is_read_with_its_prefixes(tmp_path: Path) -> None:
    text = MOONCAKE % (0, 1100, 20, "[0,1,2]") + "\n" + MOONCAKE % (3000, 1700, 30, "[0,1,5,6]")
    text += MOONCAKE % (3000, 90, 5, "[9]")
    found = read_trace(write(tmp_path / "some.jsonl", text))
    assert (found.name, found.tick) == ("some", 3.0)
    (first, second), alone = found.threads
    assert [row.prompt for row in alone] == [90]
    assert (first.at, first.prompt, first.output, first.hashes) == (0.0, 1100, 20, (0, 1, 2))
    assert (second.at, second.hashes) == (3.0, (0, 1, 5, 6))


def test_an_azure_trace_is_read_from_its_first_second(tmp_path: Path) -> None:
    rows = "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n"
    found = read_trace(write(tmp_path / "a.csv", AZURE + rows))
    rows_found = sorted((thread[0] for thread in found.threads), key=lambda row: row.at)
    assert [(row.prompt, row.output, row.hashes) for row in rows_found] == [(374, 44, ()), (396, 109, ())]
    assert [row.at for row in rows_found] == [0.0, pytest.approx(4.314579)]
    assert found.tick == 0.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "neither"),
        (AZURE, "no requests"),
        ("a,b\n1,2\n", "neither a Mooncake trace nor an Azure one"),
        (AZURE + "yesterday,1,2\n", "line 2"),
        (AZURE + "2023-11-16 18:15:46,one,2\n", "line 2"),
        (AZURE + "2023-11-16 18:15:46,1\n", "line 2"),
        (MOONCAKE % (0, 10, 1, "[1]") + "{", "line 2"),
        ('{"timestamp":0}', "line 1"),
        (MOONCAKE % (0, 10, 0, "[1]"), "line 1"),
        (MOONCAKE % (0, 1000, 1, "[1]"), "1 hashes for 1000 tokens"),
        (b"\xff\xfe\x00", "not text"),
        ("{}\n".encode("utf-16"), "not text"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(tmp_path: Path, text: str | bytes, says: str) -> None:
    with pytest.raises(BadTrace, match=says):
        read_trace(write(tmp_path / "bad", text))
