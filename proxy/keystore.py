"""Keys and budgets in an SQLite file: what `tierline keys` changes and the gateway reads, what the gateway spends, and when
each key was used last.

Rules
1. A key is shown once, when it is made. Kept is a keyed hash of it. A fast one: a key is 256 bits of chance, so that nobody
   can try keys against their hashes, however fast, and a slow one (bcrypt, argon2) would only let anybody keep the gateway
   busy with wrong keys. Keyed, with a secret of this file: nobody can choose a key by what its hash looks like, so the time
   of a look-up tells nothing.
2. WAL: who reads does not wait for who writes. Nothing here is called on the request path; each call may take as long as
   the disk does, and raises `StoreError`.
3. Every change of keys counts `changes` up in the same transaction, so that whoever reads knows when to read again.
   `PRAGMA data_version` says, without reading, whether anybody else has written at all; and the log's time (`touched`) says
   it without opening anything, but for a write in the very moment of the last look.
4. Revoked keys stay, for the list; a name is free again then.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

VERSION = 2
BUSY_SECONDS = 5.0
PREFIX = "tl-"
_ALPHABET = string.ascii_letters + string.digits
_ID_ALPHABET = string.ascii_lowercase + string.digits
SECRET_LETTERS = 43
"""Of 62: 256 bits."""

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value NOT NULL);
CREATE TABLE keys (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, tenant TEXT NOT NULL, settings TEXT NOT NULL,
    made REAL NOT NULL, expires REAL, revoked REAL);
CREATE TABLE hashes (hash BLOB PRIMARY KEY, key TEXT NOT NULL REFERENCES keys (id), made REAL NOT NULL, expires REAL);
CREATE TABLE budgets (
    account TEXT NOT NULL, kind TEXT NOT NULL, begins INTEGER NOT NULL, spent INTEGER NOT NULL,
    PRIMARY KEY (account, kind));
"""
_USES = "CREATE TABLE uses (ident TEXT PRIMARY KEY, at REAL NOT NULL)"
"""New in version 2."""

NOBODY: Mapping[str, float] = {}

T = TypeVar("T")
_Row = tuple[str, str, str, str, float, float | None, float | None]


class StoreError(Exception):
    """The file cannot be read or written. The message names the file, and no key."""


class NoSuchKey(Exception):
    """No key that is not revoked has this id or name."""


class StoredKey(NamedTuple):
    """id: what a key begins with, behind the prefix. hashes: of the keys that open it, each with the time until when; a key
    that was rotated has two for a while. Times: seconds since the epoch, None for never."""

    id: str
    name: str
    tenant: str
    settings: Mapping[str, object]
    made: float
    expires: float | None
    revoked: float | None
    hashes: tuple[tuple[bytes, float | None], ...]

    @property
    def label(self) -> str:
        """The beginning by which a key is recognized; no secret."""
        return PREFIX + self.id


class Spent(NamedTuple):
    """Of one budget of one account, in the span that begins then."""

    account: str
    kind: str
    begins: int
    spent: int


def digest(key: str) -> str:
    """sha256 in hex, as the configuration holds it. Bytes that are not UTF-8 hash as they came."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def hash_of(sha256: str, secret: bytes) -> bytes:
    """The keyed hash of a key, from its sha256 in hex."""
    hashed = keyed(secret)
    hashed.update(sha256.encode())
    return hashed.digest()


def keyed(secret: bytes) -> hashlib.blake2b:
    """The beginning of such a hash."""
    return hashlib.blake2b(key=secret, digest_size=32)


class Store:
    """One connection. To be used by one thread at a time, whichever. `now`: seconds since the epoch. durable: a change is on
    the disk when it returns; else a power cut may undo the last ones, a killed process never."""

    def __init__(self, path: str, *, durable: bool = True) -> None:
        self.path = path
        self._seen: tuple[int, int] | None = None
        self._log: tuple[int, int] | None = None
        with self._errors():
            if not os.path.exists(path):
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))  # nobody else's to read
            self._db = sqlite3.connect(
                path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                self._set_up("FULL" if durable else "NORMAL")
            except BaseException:
                self._db.close()
                raise
        self.secret: bytes = self._meta("secret")

    def _set_up(self, synchronous: str) -> None:
        self._version()
        db = self._db
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {synchronous}")
        db.execute("BEGIN IMMEDIATE")
        version = self._version()
        if version == 0:
            for statement in _SCHEMA.split(";\n"):
                db.execute(statement)
            made = [("secret", secrets.token_bytes(32)), ("changes", 0)]
            db.executemany("INSERT INTO meta VALUES (?, ?)", made)
        if version < VERSION:
            db.execute(_USES)
            db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("COMMIT")

    def _version(self) -> int:
        """0: an empty file. Whatever else is not ours stays as it is."""
        version: int = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise StoreError(f"{self.path}: of version {version}, and this Tierline knows {VERSION}")
        if version == 0 and self._db.execute("SELECT 1 FROM sqlite_master").fetchone() is not None:
            raise StoreError(f"{self.path}: is no store of Tierline's")
        return version

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{self.path}: {error}") from error

    def _together(self, do: Callable[[sqlite3.Connection], T], begin: str = "BEGIN IMMEDIATE") -> T:
        """In one transaction: all of it or nothing."""
        with self._errors():
            self._db.execute(begin)
            try:
                done = do(self._db)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            return done

    def _change(self, do: Callable[[sqlite3.Connection], T]) -> T:
        """Something about keys."""

        def both(db: sqlite3.Connection) -> T:
            db.execute("UPDATE meta SET value = value + 1 WHERE name = 'changes'")
            return do(db)

        return self._together(both)

    def _meta(self, name: str) -> bytes:
        with self._errors():
            found = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        if found is None or not isinstance(found[0], bytes):
            raise StoreError(f"{self.path}: is no store of Tierline's")
        return found[0]

    def close(self) -> None:
        self._db.close()

    # -- keys -------------------------------------------------------------------------------------------------

    def read(self) -> list[StoredKey]:
        """All of them, in the order in which they were made."""

        def read(db: sqlite3.Connection) -> tuple[list[tuple[str, bytes, float | None]], list[_Row]]:
            hashes = db.execute("SELECT key, hash, expires FROM hashes ORDER BY made").fetchall()
            keys = "SELECT id, name, tenant, settings, made, expires, revoked FROM keys ORDER BY made, id"
            return hashes, db.execute(keys).fetchall()

        found, rows = self._together(read, "BEGIN")
        hashes: dict[str, list[tuple[bytes, float | None]]] = {}
        for key, hashed, until in found:
            hashes.setdefault(key, []).append((hashed, until))
        try:
            return [
                StoredKey(
                    id, name, tenant, json.loads(settings), made, expires, revoked, tuple(hashes.get(id, ()))
                )
                for id, name, tenant, settings, made, expires, revoked in rows
            ]
        except ValueError as error:
            raise StoreError(f"{self.path}: settings that are no JSON: {error}") from error

    def add(
        self,
        now: float,
        name: str,
        tenant: str,
        settings: Mapping[str, object],
        expires: float | None = None,
    ) -> tuple[StoredKey, str]:
        """A new key, and its text: the only time that it is known. Raises ValueError if the name is taken."""

        def do(db: sqlite3.Connection) -> tuple[str, str]:
            if db.execute("SELECT 1 FROM keys WHERE name = ? AND revoked IS NULL", (name,)).fetchone():
                raise ValueError(
                    f'a key is named "{name}" already: revoke it, rotate it, or take another name'
                )
            id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(8))
            row = (id, name, tenant, json.dumps(settings), now, expires)
            db.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, NULL)", row)
            return id, self._new_hash(db, id, now)

        id, text = self._change(do)
        return self._find(id), text

    def _new_hash(self, db: sqlite3.Connection, id: str, now: float) -> str:
        text = f"{PREFIX}{id}-{''.join(secrets.choice(_ALPHABET) for _ in range(SECRET_LETTERS))}"
        hashed = hash_of(digest(text), self.secret)
        db.execute("INSERT INTO hashes VALUES (?, ?, ?, NULL)", (hashed, id, now))
        return text

    def revoke(self, now: float, which: str) -> StoredKey:
        """By id, with or without its prefix, or by name. Raises NoSuchKey."""

        def do(db: sqlite3.Connection) -> str:
            id = self._id(db, which)
            db.execute("UPDATE keys SET revoked = ? WHERE id = ?", (now, id))
            db.execute("DELETE FROM hashes WHERE key = ?", (id,))
            return id

        return self._find(self._change(do))

    def rotate(self, now: float, which: str, grace_seconds: float) -> tuple[StoredKey, str]:
        """Another text for the same key: limits, budgets and name go on. The old one works for `grace_seconds` more."""

        def do(db: sqlite3.Connection) -> tuple[str, str]:
            id = self._id(db, which)
            db.execute("DELETE FROM hashes WHERE key = ? AND expires <= ?", (id, now))
            if grace_seconds > 0:
                over = now + grace_seconds
                db.execute(
                    "UPDATE hashes SET expires = min(coalesce(expires, ?), ?) WHERE key = ?", (over, over, id)
                )
            else:
                db.execute("DELETE FROM hashes WHERE key = ?", (id,))
            return id, self._new_hash(db, id, now)

        id, text = self._change(do)
        return self._find(id), text

    def change(
        self, which: str, change: Callable[[StoredKey], tuple[Mapping[str, object], float | None]]
    ) -> StoredKey:
        """Other settings and another expiry for a key, made of what it has. Nothing changes if `change` raises."""

        def do(db: sqlite3.Connection) -> str:
            id = self._id(db, which)
            row = db.execute("SELECT name, tenant, settings, made, expires FROM keys WHERE id = ?", (id,))
            name, tenant, text, made, until = row.fetchone()
            settings, expires = change(StoredKey(id, name, tenant, json.loads(text), made, until, None, ()))
            values = (json.dumps(settings), expires, id)
            db.execute("UPDATE keys SET settings = ?, expires = ? WHERE id = ?", values)
            return id

        return self._find(self._change(do))

    def _id(self, db: sqlite3.Connection, which: str) -> str:
        found = db.execute(
            "SELECT id FROM keys WHERE revoked IS NULL AND (id = ? OR name = ?) ORDER BY id = ? DESC",
            (which.removeprefix(PREFIX), which, which.removeprefix(PREFIX)),
        ).fetchone()
        if found is None:
            raise NoSuchKey(which)
        id: str = found[0]
        return id

    def _find(self, id: str) -> StoredKey:
        return next(key for key in self.read() if key.id == id)

    # -- what the gateway does --------------------------------------------------------------------------------

    def budgets(self) -> list[Spent]:
        with self._errors():
            return [
                Spent(*row)
                for row in self._db.execute("SELECT account, kind, begins, spent FROM budgets").fetchall()
            ]

    def uses(self) -> dict[str, float]:
        """When each key was used last, by its label, or by its name in the file. Up to some seconds late."""
        with self._errors():
            return dict(self._db.execute("SELECT ident, at FROM uses").fetchall())

    def touched(self) -> bool:
        """Somebody wrote since the last turn, as far as one look at the log says. Never waits, never fails."""
        return self._log_now() != self._log

    def _log_now(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.path + "-wal")
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    def turn(self, spent: Sequence[Spent], used: Mapping[str, float] = NOBODY) -> list[StoredKey] | None:
        """Write what was spent, and which keys were used when; the keys, if they changed since the last turn (at the first
        one: always)."""
        if spent or used:
            self._together(lambda db: self._write(db, spent, used))
        self._log = self._log_now()
        with self._errors():
            (version,) = self._db.execute("PRAGMA data_version").fetchone()
            if self._seen is not None and self._seen[0] == version:
                return None
            (changes,) = self._db.execute("SELECT value FROM meta WHERE name = 'changes'").fetchone()
        same = self._seen is not None and self._seen[1] == changes
        found = None if same else self.read()
        self._seen = version, changes
        return found

    @staticmethod
    def _write(db: sqlite3.Connection, spent: Iterable[Spent], used: Mapping[str, float]) -> None:
        db.executemany(
            "INSERT INTO budgets VALUES (?, ?, ?, ?) ON CONFLICT (account, kind) DO UPDATE "
            "SET begins = excluded.begins, spent = excluded.spent",
            spent,
        )
        db.executemany(
            "INSERT INTO uses VALUES (?, ?) ON CONFLICT (ident) DO UPDATE SET at = max(at, excluded.at)",
            used.items(),
        )
