"""Reading a file: TOML in, one frozen `Config` out, or every problem at once."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from pydantic import BaseModel, ValidationError

from policies.profile import Profile, names
from proxy.config import problems, rules
from proxy.config.clients import ApiKey, KeySettings
from proxy.config.overlay import NOTHING, Overlay, Provenance
from proxy.config.problems import ELSEWHERE
from proxy.config.sections import AdminKey, Backend, Config
from proxy.config.values import PolicySource, Secret


class ConfigError(Exception):
    """The configuration cannot be used. `problems`: one line each, `FILE: key.path: what is wrong`."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def load(path: str | Path, env: Mapping[str, str] = os.environ, overlay: Overlay = NOTHING) -> Config:
    """Read, validate and cross-check a file, with an overlay over it. Raises `ConfigError` with every problem found."""
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not UTF-8 at byte {error.start}"]) from None
    config = loads(text, env, source=str(path), folder=Path(path).parent, overlay=overlay)
    # No keys of the file, and no part of what makes two equal.
    config.__dict__["source"] = Path(path)
    state = env.get("STATE_DIRECTORY", "").partition(":")[0]  # systemd's
    config.__dict__["home"] = Path(state) if state else Path(path).parent
    return config


def load_with(path: str | Path, candidate: str | Path, env: Mapping[str, str] = os.environ) -> Config:
    """`load` with the tables `policy` and `tiers` of another file in place of its own; whatever else that holds is left
    out of account. A policy's own file is looked for beside it."""
    try:
        base, over = (
            tomllib.loads(Path(path).read_text("utf-8")),
            tomllib.loads(Path(candidate).read_text("utf-8")),
        )
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{error}"]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([problems.syntax(str(candidate), str(error))]) from None
    taken: dict[str, object] = {name: over[name] for name in ("policy", "tiers") if name in over}
    if not taken:
        raise ConfigError([f"{candidate}: has neither [policy] nor [tiers]"])
    policy = taken.get("policy")
    if isinstance(policy, dict) and isinstance(policy.get("file"), str):
        taken["policy"] = {**policy, "file": str(Path(candidate).parent.absolute() / policy["file"])}
    return _read({**base, **taken}, env, str(candidate), Path(path).parent)


def load_policy(path: str | Path, env: Mapping[str, str] = os.environ) -> Config:
    """The policy of a file, for a fleet that no configuration describes: its [policy] and [tiers], and one backend that
    nobody asks. Whatever else the file holds is left out of account."""
    try:
        data = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{error}"]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([problems.syntax(str(path), str(error))]) from None
    taken: dict[str, object] = {name: data[name] for name in ("policy", "tiers") if name in data}
    nobody = {"backends": [{"name": "nobody", "url": "http://127.0.0.1:9"}], "models": {"model": {}}}
    return _read({**nobody, **taken}, env, str(path), Path(path).parent)


def loads(
    text: str,
    env: Mapping[str, str] = os.environ,
    *,
    source: str = "config",
    folder: Path = Path(),
    overlay: Overlay = NOTHING,
) -> Config:
    """`load` for text. source: the name in messages. folder: where relative paths start."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([problems.syntax(source, str(error))]) from None
    return _read(data, env, source, folder, overlay)


def load_over(config: Config, overlay: Overlay, env: Mapping[str, str] = os.environ) -> Config:
    """The same file as it was when `config` was read, with another overlay. Raises `ConfigError`."""
    origin = config.origin
    read = _read(dict(origin.document), env, origin.source, Path(origin.folder), overlay)
    read.__dict__["source"], read.__dict__["home"] = config.source, config.home
    return read


def _read(
    document: dict[str, object],
    env: Mapping[str, str],
    source: str,
    folder: Path,
    overlay: Overlay = NOTHING,
) -> Config:
    data = overlay.over(document) if overlay else document
    context = {"env": env, "folder": folder}
    wrong: list[str] = []
    doubtful: frozenset[str] = frozenset()
    try:
        config = Config.model_validate(data, context=context)
    except ValidationError as error:
        found = error.errors(include_url=False)
        wrong = [problems.line(dict(e), Config) for e in found]
        # The sound sections are still checked against each other, so that one run shows all there is to mend.
        doubtful = frozenset(str(e["loc"][0]) for e in found)
        sound = {key: value for key, value in data.items() if key not in doubtful}
        config = Config.model_validate(sound, context=context)
    wrong += rules.check(config, doubtful)
    if wrong:
        raise ConfigError([f"{source}: {problem}" for problem in wrong])
    config.__dict__["origin"] = Provenance(document, source, str(folder), overlay)
    return config


def read_settings(data: Mapping[str, object], source: str) -> KeySettings:
    """What a key of the store may do. Raises `ConfigError`; `source` names the key in its lines."""
    try:
        return KeySettings.model_validate(data)
    except ValidationError as error:
        found = [problems.line(dict(e), KeySettings) for e in error.errors(include_url=False)]
        raise ConfigError([f"{source}: {problem}" for problem in found]) from None


def backend_at(
    url: str, key: str | None = None, model: str | None = None, *, insecure: bool = False
) -> Backend:
    """A backend that no file names: an address of the command line. key: a reference, as in a file. A `/v1` at its end
    is left out. Raises `ConfigError`."""
    data: dict[str, object] = {"name": "url", "url": url.rstrip("/").removesuffix("/v1"), "model": model}
    data |= {} if key is None else {"key": key}
    data |= {"tls": {"insecure_any_certificate": True}} if insecure else {}
    try:
        return Backend.model_validate(data, context={"env": os.environ, "folder": Path()})
    except ValidationError as error:
        raise ConfigError(
            [problems.line(dict(e), Backend) for e in error.errors(include_url=False)]
        ) from None


def read_profile(name: str) -> Profile:
    """A profile by its name, or one in a file. Raises `ConfigError`."""
    data = {"name": "a", "url": "http://127.0.0.1", "profile": name}
    try:
        found = Backend.model_validate(data, context={"folder": Path()}).measured
    except ValidationError as error:
        raise ConfigError(
            [problems.line(dict(e), Backend) for e in error.errors(include_url=False)]
        ) from None
    if found is None:
        raise ConfigError([f'no profile is named "{name}" (known: {", ".join(names())})'])
    return found


def check_key(config: Config, name: str, tenant: str, data: Mapping[str, object]) -> list[str]:
    """What the configuration would say of a key with these settings."""
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in data.items()}
    try:
        key = ApiKey.model_validate({**plain, "name": name, "tenant": tenant, "sha256": "0" * 64})
    except ValidationError as error:
        return [problems.line(dict(e), ApiKey) for e in error.errors(include_url=False)]
    server = config.server.model_copy(update={"keys": (key,)})
    found = rules.check(config.model_copy(update={"server": server}))
    return [line.removeprefix("server.keys[0].") for line in found if line.startswith("server.keys[0]")]


def effective(config: Config) -> dict[str, object]:
    """The configuration with every default filled in and every secret masked, as plain data."""
    return cast(dict[str, object], _plain(config))


def _plain(value: object) -> object:
    if isinstance(value, (ApiKey, AdminKey)):
        hashed = f"{value.sha256[:8]}…" if value.sha256 else None
        shown = {name: _plain(getattr(value, name)) for name in type(value).model_fields}
        return {**shown, "sha256": hashed}
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, PolicySource):
        return value.path
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        elsewhere = ELSEWHERE.get(type(value), ())
        names = [field.name for field in dataclasses.fields(value) if field.name not in elsewhere]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Secret):
        return f"*** ({value.reference})"
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
