"""What must hold between keys, tenants, models and limits. As `rules`, which knows these, says."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from policies.limits import BILLION, BUDGETS, COSTS, MINUTE, LimitKind
from proxy.config.problems import key_path
from proxy.config.shared import ENCRYPTED

if TYPE_CHECKING:
    from proxy.config.clients import Allowed, KeySettings
    from proxy.config.sections import Config


def key_forms(config: Config) -> Iterator[str]:
    for index, key in enumerate(config.server.keys):
        if (key.key is None) == (key.sha256 is None):
            yield f"server.keys[{index}]: give either key or sha256, and not both"


def key_twins(config: Config) -> Iterator[str]:
    for index, key in enumerate(config.server.keys):
        for first, other in enumerate(config.server.keys[:index]):
            if other.name == key.name:
                yield f'server.keys[{index}].name: "{key.name}" is already the name of server.keys[{first}]'
            if key.digest and other.digest == key.digest:
                yield f"server.keys[{index}]: the same key as server.keys[{first}], but another tenant"


def admin_key_is_its_own(config: Config) -> Iterator[str]:
    admin = config.admin
    digests = [("admin.key", admin.key.digest)] if admin.key is not None else []
    names = ["admin"] if admin.key is not None else []
    for index, key in enumerate(admin.keys):
        path = f"admin.keys[{index}]"
        if (key.key is None) == (key.sha256 is None):
            yield f"{path}: give either key or sha256, and not both"
        if key.name in names:
            yield f'{path}.name: "{key.name}" is already the name of another one'
        names.append(key.name)
        if any(key.digest == digest for _, digest in digests):
            yield f"{path}: the same key as another one, under another name"
        digests.append((path, key.digest))
    for index, client in enumerate(config.server.keys):
        for path, digest in digests:
            if client.digest and client.digest == digest:
                yield f"{path}: the same key as server.keys[{index}]: a client could drain backends"


def _settings(config: Config) -> Iterator[tuple[str, KeySettings]]:
    for index, key in enumerate(config.server.keys):
        yield f"server.keys[{index}]", key
    for name, tenant in config.tenants.items():
        yield key_path(("tenants", name)), tenant


def _limits(config: Config) -> Iterator[tuple[str, Allowed]]:
    for path, settings in _settings(config):
        yield f"{path}.limits", settings.limits
    for name, model in config.models.items():
        yield f"{key_path(('models', name))}.limits", model.limits


def clients_models_and_tiers_exist(config: Config) -> Iterator[str]:
    """A name that nobody serves would lock a client out without a word."""
    for path, settings in _settings(config):
        for kind, names, known in (
            ("model", settings.models, config.routes),
            ("tier", settings.tiers, config.tiers),
        ):
            have = ", ".join(f'"{one}"' for one in known) or "none"
            for index, name in enumerate(names):
                if name not in known:
                    yield f'{path}.{kind}s[{index}]: no {kind} is named "{name}" (configured: {have})'


def aliases_have_no_limits(config: Config) -> Iterator[str]:
    for name, model in config.models.items():
        if model.alias_of is not None:
            for key in ("limits", "price"):
                if getattr(model, key) != type(model).model_fields[key].default:
                    path = key_path(("models", name, key))
                    yield f"{path}: an alias shares those of its model: move them there, or drop them"


def budgets_are_kept(config: Config) -> Iterator[str]:
    for path, limits in _limits(config):
        for kind in BUDGETS:
            if getattr(limits, kind) is not None and config.server.store is None:
                yield f"{path}.{kind}: would begin anew at each restart: set server.store, where it is kept"


def money_has_a_price(config: Config) -> Iterator[str]:
    if any(model.price.prompt or model.price.completion for model in config.models.values()):
        return
    for path, limits in _limits(config):
        for kind in sorted(COSTS):
            if getattr(limits, kind) is not None:
                yield f"{path}.{kind}: no model has a price, so it could never be reached: set models.NAME.price"


def sharing_is_possible(config: Config) -> Iterator[str]:
    shared = config.limits.shared
    if shared.url is not None and importlib.util.find_spec("valkey") is None:
        yield "limits.shared.url: the client's library is not installed here: pip install 'tierline[valkey]'"
    if shared.scheme not in ENCRYPTED:
        for key in ("ca", "verify"):
            if getattr(shared, key) != type(shared).model_fields[key].default:
                yield f'limits.shared.{key}: only with "valkeys://"; this connection is not encrypted'
    if shared.username is not None and shared.password is None:
        yield "limits.shared.username: needs a password"


def spans_are_possible(config: Config) -> Iterator[str]:
    parts = ("opentelemetry", "opentelemetry.exporter", "opentelemetry.sdk")
    if config.telemetry.otlp is not None and not all(map(importlib.util.find_spec, parts)):
        yield "telemetry.otlp: OpenTelemetry's SDK is not installed here: pip install 'tierline[otel]'"


def shared_limits_are_exact(config: Config) -> Iterator[str]:
    """The server counts in whole numbers up to 2^53; a bucket in 60 millionths, money in billionths."""
    if config.limits.shared.url is None:
        return
    most = dict.fromkeys(LimitKind, EXACT) | dict.fromkeys(COSTS, EXACT // BILLION)
    most[LimitKind.REQUESTS] = most[LimitKind.TOKENS] = EXACT // MINUTE
    for path, limits in _limits(config):
        for kind, value in most.items():
            found = getattr(limits, kind)
            if found is not None and found > value:
                yield f"{path}.{kind}: at most {value} where limits are shared (limits.shared), got {found}"


EXACT = 2**53

CLIENT_RULES: tuple[tuple[tuple[str, ...], Callable[[Config], Iterator[str]]], ...] = (
    (("server",), key_forms),
    (("server",), key_twins),
    (("server", "admin"), admin_key_is_its_own),
    (("server", "tenants", "models", "tiers"), clients_models_and_tiers_exist),
    (("models",), aliases_have_no_limits),
    (("server", "tenants", "models"), budgets_are_kept),
    (("server", "tenants", "models"), money_has_a_price),
    (("limits",), sharing_is_possible),
    (("telemetry",), spans_are_possible),
    (("server", "tenants", "models", "limits"), shared_limits_are_exact),
)
