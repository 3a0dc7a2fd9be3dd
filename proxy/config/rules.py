"""What no single key can tell: rules between keys. Each is a function with its own message.

Rules
1. A rule yields `key.path: problem` lines and changes nothing. RULES names the sections it reads; a rule is
   skipped when one of them could not be read, for its verdict would be a guess.
2. Whether a tier fits a backend is asked of the very filter that routes requests.
"""

from __future__ import annotations

import difflib
import importlib.util
import ipaddress
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from policies import BackendView, ContextEstimate, DropReason, RequestFacts, RouterParams, drop_reason
from policies.profile import names
from proxy.config.clientrules import CLIENT_RULES
from proxy.config.problems import key_path
from proxy.config.tls import backend_files_fit, listener_files_fit, proxies_are_named

if TYPE_CHECKING:
    from proxy.config.sections import Backend, Config

Rule = Callable[["Config"], Iterator[str]]


def check(config: Config, doubtful: frozenset[str] = frozenset()) -> list[str]:
    """Every broken rule. doubtful: sections that did not validate."""
    return [problem for reads, rule in RULES if not doubtful & set(reads) for problem in rule(config)]


# -- backends ------------------------------------------------------------------------------------------------


def some_backend(config: Config) -> Iterator[str]:
    if not config.backends:
        yield "backends: none is configured: add [[backends]] with name and url"


def backend_twins(config: Config) -> Iterator[str]:
    """Two names for one URL would count its load twice. Two served models behind one URL are two backends."""
    names: dict[str, int] = {}
    places: dict[tuple[str, str | None], int] = {}
    for index, backend in enumerate(config.backends):
        first = names.setdefault(backend.name, index)
        if first != index:
            yield f'backends[{index}].name: "{backend.name}" is already the name of backends[{first}]'
        first = places.setdefault((backend.url, backend.model), index)
        if first != index:
            yield f"backends[{index}].url: {backend.url} is already the URL of backends[{first}]"


def profiles_exist(config: Config) -> Iterator[str]:
    for index, backend in enumerate(config.backends):
        if backend.profile is not None and backend.measured is None:
            near = difflib.get_close_matches(backend.profile, names(), n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"known: {', '.join(names())}"
            yield f'backends[{index}].profile: no profile is named "{backend.profile}", {hint}'


def reference_has_no_divergence(config: Config) -> Iterator[str]:
    for index, backend in enumerate(config.backends):
        if backend.quality.reference and backend.quality.kl_bits:
            yield (
                f"backends[{index}].quality: reference weights diverge from themselves by 0 bits, not "
                f"{backend.quality.kl_bits:g}: drop kl_bits or reference"
            )


# -- models and tiers ----------------------------------------------------------------------------------------


def some_model(config: Config) -> Iterator[str]:
    if not config.models:
        yield "models: none is configured: add [models.NAME], where NAME is what clients ask for"


def model_backends_exist(config: Config) -> Iterator[str]:
    known = {backend.name for backend in config.backends}
    for name, model in config.models.items():
        for index, backend in enumerate(model.backends):
            path = key_path(("models", name, "backends", index))
            if backend not in known:
                have = ", ".join(f'"{one}"' for one in sorted(known)) or "none"
                yield f'{path}: no backend is named "{backend}" (configured: {have})'
            elif backend in model.backends[:index]:
                yield f'{path}: "{backend}" is listed twice'


def model_name_twins(config: Config) -> Iterator[str]:
    for name, model in config.models.items():
        for index, alias in enumerate(model.aliases):
            path = key_path(("models", name, "aliases", index))
            if alias in config.models:
                yield f'{path}: "{alias}" is already the name of a model: {key_path(("models", alias))}'
            elif alias in model.aliases[:index]:
                yield f'{path}: "{alias}" is listed twice'
            elif (other := owner(config, alias)) != name:
                yield f'{path}: "{alias}" is already an alias of "{other}"'


def owner(config: Config, name: str) -> str | None:
    """The key in [models] that a public name belongs to: the first one that claims it."""
    if name in config.models:
        return name
    return next((key for key, model in config.models.items() if name in model.aliases), None)


def aliases_lead_to_models(config: Config) -> Iterator[str]:
    for name, model in config.models.items():
        if model.alias_of is None:
            continue
        path = key_path(("models", name))
        if model.backends:
            yield f"{path}.backends: an alias is served where its model is: drop backends or alias_of"
        chain, here = [name], owner(config, model.alias_of)
        if here is None:
            known = ", ".join(f'"{one}"' for one, other in config.models.items() if other.alias_of is None)
            yield f'{path}.alias_of: no model is named "{model.alias_of}" (configured: {known or "none"})'
        while here is not None and here not in chain:
            chain.append(here)
            onward = config.models[here].alias_of
            here = None if onward is None else owner(config, onward)
        if here == name:  # a chain that only runs into somebody else's circle is reported there
            yield f"{path}.alias_of: goes in a circle: {' → '.join([*chain, name])}"


def tiers_exist(config: Config) -> Iterator[str]:
    known = ", ".join(f'"{tier}"' for tier in config.tiers)
    if config.policy.default_tier not in config.tiers:
        yield f'policy.default_tier: no tier is named "{config.policy.default_tier}" (configured: {known})'
    for name, model in config.models.items():
        if model.tier is not None and model.tier not in config.tiers:
            path = key_path(("models", name, "tier"))
            yield f'{path}: no tier is named "{model.tier}" (configured: {known})'


def exact_means_reference(config: Config) -> Iterator[str]:
    if not config.tiers["exact"].reference:
        yield "tiers.exact.reference: must stay true: exact promises the reference weights"


def tiers_can_be_served(config: Config) -> Iterator[str]:
    """Asked only of sound routes; what is broken there has its own message."""
    if any(True for rule in ROUTE_RULES for _ in rule(config)):
        return
    for route in config.routes.values():
        if route.backends and not serving(config, route.backends, route.tier):
            tier = config.tiers[route.tier]
            wants = ["reference weights"] if tier.reference else []
            if tier.max_kl_bits is not None and not wants:
                wants = [f"kl_bits of at most {tier.max_kl_bits:g}"]
            mend = "set their quality" if wants else "set their gate (tierline gate URL --out FILE)"
            wants += ["a passed gate"] if tier.requires_gate else []
            yield (
                f'{key_path(("models", route.name))}: tier "{route.tier}" wants {" and ".join(wants)}, and none of '
                f"its backends has that ({', '.join(route.backends)}): {mend}, or another tier"
            )


def serving(config: Config, names: tuple[str, ...], tier: str) -> tuple[str, ...]:
    """Those of the named backends whose quality the tier accepts."""
    return tuple(name for name in names if _fits(config, config.backend(name), tier))


def _fits(config: Config, backend: Backend, tier: str) -> bool:
    wanted = config.tier(tier)
    if wanted is None:
        return False
    nothing = ContextEstimate(tokens=0, low=0, high=0)
    reference, kl_bits = backend.worth
    passed = None if backend.gate_passed_at is None else 0.0  # how old it is, is seen when a request comes
    view = BackendView(backend.name, reference=reference, kl_bits=kl_bits, gate_age=passed)
    reason = drop_reason(RequestFacts("", wanted, nothing, 0), view, RouterParams())
    return reason not in (DropReason.TIER, DropReason.GATE)


# -- listeners and access ------------------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _overlap(one: str, other: str) -> bool:
    everywhere = {"0.0.0.0", "::"}
    return (
        one == other or bool({one, other} & everywhere) or {one, other} <= {"127.0.0.1", "::1", "localhost"}
    )


def listeners_apart(config: Config) -> Iterator[str]:
    server, admin = config.server, config.admin
    if admin.enabled and server.port == admin.port != 0 and _overlap(server.host, admin.host):
        yield f"admin.port: {admin.port} is already the port of server: give the admin listener another"


def keys_beyond_loopback(config: Config) -> Iterator[str]:
    server = config.server
    if not (is_loopback(server.host) or server.keys or server.store or server.allow_unauthenticated):
        yield (
            f'server.host: "{server.host}" can be reached from other machines, and without keys anyone '
            'there could use the backends: add [[server.keys]] or server.store, or bind to "127.0.0.1", or accept it with '
            "allow_unauthenticated = true"
        )


def admin_key_beyond_loopback(config: Config) -> Iterator[str]:
    admin = config.admin
    if admin.enabled and not is_loopback(admin.host) and admin.key is None and not admin.keys:
        yield (
            f'admin.host: "{admin.host}" can be reached from other machines, and whoever reaches it '
            'could drain backends: set admin.key, or bind to "127.0.0.1"'
        )


def metrics_somewhere(config: Config) -> Iterator[str]:
    if config.admin.metrics_on == "admin" and not config.admin.enabled:
        yield 'admin.metrics_on: "admin", but the admin listener is not enabled: nothing could be scraped'


def uvloop_is_there(config: Config) -> Iterator[str]:
    if config.server.uvloop == "on" and importlib.util.find_spec("uvloop") is None:
        yield 'server.uvloop: "on", but uvloop is not installed here: install it, or write "auto"'


# -- times ---------------------------------------------------------------------------------------------------


def timeouts_in_order(config: Config) -> Iterator[str]:
    """A limit that a larger one inside it can never reach is a mistake, not a setting."""
    general = config.timeouts
    if general.keepalive_after >= general.first_token:
        yield (
            f"timeouts.keepalive_after: {general.keepalive_after:g} s is not below first_token "
            f"({general.first_token:g} s), so no comment would ever be sent; 0 turns them off"
        )
    for path, times in [
        ("timeouts", general),
        *(
            (f"backends[{i}].timeouts", config.timeouts_for(backend))
            for i, backend in enumerate(config.backends)
        ),
    ]:
        if path != "timeouts" and times == general:
            continue
        for name, value in (
            ("connect", times.connect),
            ("first_token", times.first_token),
            ("gap", times.gap),
        ):
            if value > times.total:
                yield f"{path}.{name}: {value:g} s is above total ({times.total:g} s)"


ROUTE_RULES: tuple[Rule, ...] = (
    backend_twins,
    model_backends_exist,
    model_name_twins,
    aliases_lead_to_models,
    tiers_exist,
)

RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("backends",), some_backend),
    (("backends",), backend_twins),
    (("backends",), profiles_exist),
    (("backends",), backend_files_fit),
    (("backends",), reference_has_no_divergence),
    (("models",), some_model),
    (("models", "backends"), model_backends_exist),
    (("models",), model_name_twins),
    (("models",), aliases_lead_to_models),
    (("models", "tiers", "policy"), tiers_exist),
    (("tiers",), exact_means_reference),
    (("backends", "models", "tiers", "policy"), tiers_can_be_served),
    (("server", "admin"), listeners_apart),
    (("server", "admin"), listener_files_fit),
    (("server",), proxies_are_named),
    (("server",), uvloop_is_there),
    (("server",), keys_beyond_loopback),
    (("admin",), admin_key_beyond_loopback),
    *CLIENT_RULES,
    (("admin",), metrics_somewhere),
    (("timeouts", "backends"), timeouts_in_order),
)
