"""Keys and budgets in a file: shown once, hashed, changed by one process and seen by another."""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.keystore import NoSuchKey, Spent, Store, StoredKey, StoreError, hash_of

NOW = 1_800_000_000.0


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "tierline.db")


_open: list[Store] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _open:
        _open.pop().close()


def opened(path: str, *, durable: bool = True) -> Store:
    _open.append(Store(path, durable=durable))
    return _open[-1]


def opens(store: Store, text: str, at: float = NOW) -> str | None:
    """The name of the key that this text opens."""
    hashed = hash_of(hashlib.sha256(text.encode()).hexdigest(), store.secret)
    for key in store.read():
        for known, until in key.hashes:
            if known == hashed and key.revoked is None and (until is None or at < until):
                return key.name
    return None


def only(store: Store) -> StoredKey:
    (key,) = store.read()
    return key


def test_a_key_begins_with_what_it_is_recognized_by_and_opens_what_it_was_made_for(path: str) -> None:
    store = opened(path)
    made, text = store.add(NOW, "batch", "team", {"models": ["m"]}, NOW + 60)
    assert re.fullmatch(r"tl-[a-z0-9]{8}-[A-Za-z0-9]{43}", text)
    assert text.startswith(made.label + "-")
    assert opens(store, text) == "batch"
    assert opens(store, text[:-1]) is None
    assert made == only(store)
    assert (made.tenant, made.settings, made.made, made.expires) == ("team", {"models": ["m"]}, NOW, NOW + 60)


def test_two_keys_have_nothing_in_common(path: str) -> None:
    store = opened(path)
    texts = {store.add(NOW, f"k{n}", "t", {})[1] for n in range(50)}
    assert len({text.split("-")[2] for text in texts}) == len({text.split("-")[1] for text in texts}) == 50


def test_the_file_holds_no_key_and_no_plain_hash_of_one_and_only_its_owner_reads_it(path: str) -> None:
    store = opened(path)
    _, text = store.add(NOW, "batch", "team", {})
    store.close()
    held = b"".join(file.read_bytes() for file in Path(path).parent.iterdir())
    secret = text.rpartition("-")[2]
    assert secret.encode() not in held
    assert hashlib.sha256(text.encode()).digest() not in held
    assert hashlib.sha256(text.encode()).hexdigest().encode() not in held
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_the_same_key_has_another_hash_in_another_store(tmp_path: Path) -> None:
    one, other = opened(str(tmp_path / "a.db")), opened(str(tmp_path / "b.db"))
    assert one.secret != other.secret
    assert hash_of("ab" * 32, one.secret) != hash_of("ab" * 32, other.secret)
    assert opened(str(tmp_path / "a.db")).secret == one.secret


def test_a_revoked_key_opens_nothing_and_its_name_is_free(path: str) -> None:
    store = opened(path)
    made, text = store.add(NOW, "batch", "team", {})
    with pytest.raises(ValueError, match='named "batch" already'):
        store.add(NOW, "batch", "team", {})
    gone = store.revoke(NOW + 1, made.label)
    assert (gone.revoked, gone.hashes) == (NOW + 1, ())
    assert opens(store, text) is None
    again, _ = store.add(NOW + 2, "batch", "team", {})
    assert store.revoke(NOW + 3, "batch").id == again.id
    assert [key.revoked for key in store.read()] == [NOW + 1, NOW + 3]
    for which in ("batch", made.id, made.label, "", "tl-", text):
        with pytest.raises(NoSuchKey):
            store.revoke(NOW, which)


def test_an_id_is_meant_before_a_name(path: str) -> None:
    store = opened(path)
    one, _ = store.add(NOW, "one", "t", {})
    two, _ = store.add(NOW, one.id, "t", {})
    assert store.revoke(NOW, one.id).id == one.id
    assert store.revoke(NOW, one.id).id == two.id


def test_a_rotated_key_is_the_same_key_and_the_old_text_works_for_its_grace(path: str) -> None:
    store = opened(path)
    made, first = store.add(NOW, "batch", "team", {"priority": 3}, NOW + 1000)
    same, second = store.rotate(NOW, "batch", 60.0)
    assert (same.id, same.settings, same.expires) == (made.id, {"priority": 3}, NOW + 1000)
    assert [opens(store, text, NOW + 59) for text in (first, second)] == ["batch", "batch"]
    assert [opens(store, text, NOW + 60) for text in (first, second)] == [None, "batch"]
    _, third = store.rotate(NOW + 1, "batch", 600.0)
    assert [opens(store, text, NOW + 61) for text in (first, second, third)] == [None, "batch", "batch"]
    _, fourth = store.rotate(NOW + 2, "batch", 0.0)
    texts = (first, second, third, fourth)
    assert [opens(store, text, NOW + 2) for text in texts] == [None, None, None, "batch"]
    assert len(only(store).hashes) == 1


def test_a_changed_key_is_the_same_key_with_what_was_made_of_it(path: str) -> None:
    store, gateway = opened(path), opened(path)
    made, text = store.add(NOW, "batch", "team", {"priority": 3}, NOW + 1000)
    gateway.turn(())
    changed = store.change("batch", lambda key: ({**key.settings, "models": ["m"]}, NOW + 2000))
    assert changed == made._replace(settings={"priority": 3, "models": ["m"]}, expires=NOW + 2000)
    assert gateway.turn(()) == [changed]
    assert opens(store, text) == "batch"

    def refuses(_: StoredKey) -> tuple[dict[str, object], None]:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        store.change("batch", refuses)
    with pytest.raises(NoSuchKey):
        store.change("other", lambda key: ({}, None))
    assert (only(store), gateway.turn(())) == (changed, None)


def test_when_a_key_was_used_last_is_kept_and_never_goes_back(path: str) -> None:
    one, other = opened(path), opened(path)
    one.turn((), {"tl-a": 5.0, "tl-b": 1.0})
    other.turn((), {"tl-a": 4.0, "tl-b": 2.0})
    assert opened(path).uses() == {"tl-a": 5.0, "tl-b": 2.0}


def test_one_look_at_the_log_tells_what_another_wrote_and_not_what_this_one_did(path: str) -> None:
    gateway, cli = opened(path, durable=False), opened(path)
    gateway.turn([Spent("key:x", "tokens_per_day", 0, 5)])
    assert not gateway.touched()
    cli.add(NOW, "batch", "team", {})
    assert gateway.touched()
    assert gateway.turn(()) is not None
    assert not gateway.touched()


def test_a_store_of_the_first_version_is_brought_to_this_one_with_all_that_is_in_it(path: str) -> None:
    store = opened(path)
    made, _ = store.add(NOW, "batch", "team", {})
    store.turn([Spent("key:x", "tokens_per_day", 0, 5)])
    _open.pop().close()
    first = sqlite3.connect(path)
    first.executescript("DROP TABLE uses; PRAGMA user_version = 1;")
    first.close()
    store = opened(path)
    assert (store.read(), store.budgets(), store.uses()) == (
        [made],
        [Spent("key:x", "tokens_per_day", 0, 5)],
        {},
    )


def test_a_turn_reads_the_keys_at_first_and_whenever_another_process_changed_them(path: str) -> None:
    gateway, cli = opened(path, durable=False), opened(path)
    assert gateway.turn(()) == []
    assert gateway.turn(()) is None
    made, _ = cli.add(NOW, "batch", "team", {})
    assert gateway.turn(()) == [made]
    assert gateway.turn(()) is None
    cli.rotate(NOW, "batch", 0.0)
    assert gateway.turn([Spent("key:x", "tokens_per_day", 0, 5)]) == cli.read()
    cli.revoke(NOW, "batch")
    assert [key.revoked for key in gateway.turn(()) or ()] == [NOW]


def test_what_others_spend_is_no_change_of_keys(path: str) -> None:
    one, other = opened(path), opened(path)
    one.turn(())
    other.turn([Spent("key:x", "tokens_per_day", 0, 5)])
    assert one.turn(()) is None


def test_spending_is_there_after_a_restart_the_last_word_for_each_budget(path: str) -> None:
    store = opened(path, durable=False)
    store.turn([Spent("key:x", "tokens_per_day", 0, 5), Spent("key:y", "tokens_per_day", 0, 1)])
    store.turn([Spent("key:x", "tokens_per_day", 86_400, 2), Spent("key:x", "tokens_per_month", 0, 7)])
    store.close()
    assert sorted(opened(path).budgets()) == [
        Spent("key:x", "tokens_per_day", 86_400, 2),
        Spent("key:x", "tokens_per_month", 0, 7),
        Spent("key:y", "tokens_per_day", 0, 1),
    ]


def test_a_change_that_fails_in_the_middle_changes_nothing(path: str) -> None:
    store = opened(path)
    store.turn(())
    with pytest.raises(StoreError):
        store.turn([Spent("key:x", "tokens_per_day", 0, 5), Spent("key:y", "d", 0, None)])  # type: ignore[arg-type]
    assert store.budgets() == []
    store.turn([Spent("key:x", "tokens_per_day", 0, 6)])
    assert store.budgets() == [Spent("key:x", "tokens_per_day", 0, 6)]


@pytest.mark.parametrize("content", [b"not a database at all, and long enough to be seen as one" * 100, b""])
def test_a_file_that_is_no_database_is_refused_and_an_empty_one_is_set_up(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)
    if content:
        with pytest.raises(StoreError, match=r"tierline\.db"):
            opened(path)
        assert Path(path).read_bytes() == content
    else:
        assert opened(path).read() == []


def test_somebody_elses_database_is_left_alone(path: str) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE theirs (x)")
    with pytest.raises(StoreError, match="no store of Tierline's"):
        opened(path)
    assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
    assert other.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    other.close()


def test_a_store_of_a_later_version_is_refused(path: str) -> None:
    opened(path).close()
    later = sqlite3.connect(path)
    later.execute("PRAGMA user_version = 99")
    later.close()
    with pytest.raises(StoreError, match="version 99"):
        opened(path)


def test_a_folder_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file"):
        opened(str(tmp_path / "none" / "tierline.db"))
