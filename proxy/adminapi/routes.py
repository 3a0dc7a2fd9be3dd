"""Everything that the admin listener answers, in one table: the router and the OpenAPI document are made of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from proxy.adminapi import backends, clients, general, policies
from proxy.adminapi.gear import Call, Gear
from proxy.config import bodies
from proxy.config.policy import Section

Does = Callable[[Gear, Call], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Route:
    """body: what it takes; None: nothing. optional: nothing will do, too. status: of success. changes: not for a key whose
    role is `read`. fails: besides what every route may answer. open: for anybody who reaches the listener."""

    method: str
    path: str
    does: Does
    says: str
    body: type[Section] | None = None
    optional: bool = False
    status: int = 200
    changes: bool = False
    fails: tuple[int, ...] = ()
    open: bool = False


ROUTES = (
    Route("GET", "/health", general.health, "Whether the gateway runs.", open=True),
    Route("GET", "/version", general.version, "The gateway's version.", open=True),
    Route("GET", "/admin/backends", backends.all_of_them, "Every backend as routing sees it."),
    Route(
        "POST",
        "/admin/backends",
        backends.add,
        "Add a backend: it is asked at once, and takes requests when it is well.",
        bodies.BackendBody,
        status=201,
        changes=True,
        fails=(409,),
    ),
    Route("GET", "/admin/backends/{name}", backends.one, "One backend, and its table.", fails=(404,)),
    Route(
        "PATCH",
        "/admin/backends/{name}",
        backends.change,
        "Change keys of a backend. The same URL and model keep what was learned of it.",
        bodies.BackendChange,
        changes=True,
        fails=(404, 409),
    ),
    Route(
        "DELETE",
        "/admin/backends/{name}",
        backends.remove,
        "Remove a backend: nothing new goes there, what runs there ends by itself.",
        changes=True,
        fails=(404, 409),
    ),
    Route(
        "POST",
        "/admin/backends/{name}/drain",
        backends.drain,
        "No new requests; what runs may finish.",
        changes=True,
        fails=(404,),
    ),
    Route(
        "POST",
        "/admin/backends/{name}/undrain",
        backends.undrain,
        "Requests again.",
        changes=True,
        fails=(404,),
    ),
    Route("GET", "/admin/policy", policies.show, "The policy in force, and those before it."),
    Route(
        "POST",
        "/admin/policy/check",
        policies.check,
        "Whether a policy could be put in force, and what it would change. Nothing is changed.",
        bodies.PolicyBody,
        fails=(409,),
    ),
    Route(
        "POST",
        "/admin/policy/replay",
        policies.replay,
        "The recorded traffic under a policy, beside what was: the gate of `tierline replay`.",
        bodies.ReplayBody,
        fails=(409,),
    ),
    Route(
        "POST",
        "/admin/policy/activate",
        policies.activate,
        "Put a policy in force; with `replay`, only if the recorded traffic is no worse off.",
        bodies.ActivateBody,
        changes=True,
        fails=(409,),
    ),
    Route(
        "POST",
        "/admin/policy/rollback",
        policies.rollback,
        "Back to a policy that was in force before.",
        bodies.RollbackBody,
        optional=True,
        changes=True,
        fails=(409,),
    ),
    Route(
        "POST",
        "/admin/policy/revert",
        policies.revert,
        "Back to the policy of the file.",
        changes=True,
        fails=(409,),
    ),
    Route("GET", "/admin/keys", clients.keys, "The store's keys, by their beginnings.", fails=(409, 503)),
    Route(
        "POST",
        "/admin/keys",
        clients.add,
        "Make a key. Its text is in this answer, and nowhere else.",
        bodies.KeyBody,
        status=201,
        changes=True,
        fails=(409, 503),
    ),
    Route(
        "PATCH",
        "/admin/keys/{key}",
        clients.change,
        "Change what a key may, or until when. `key`: its beginning (tl-…) or its name.",
        bodies.KeyChange,
        changes=True,
        fails=(404, 409, 503),
    ),
    Route("DELETE", "/admin/keys/{key}", clients.revoke, "End a key.", changes=True, fails=(404, 409, 503)),
    Route(
        "POST",
        "/admin/keys/{key}/rotate",
        clients.rotate,
        "Another text for a key: limits, budgets and name go on.",
        bodies.RotateBody,
        optional=True,
        changes=True,
        fails=(404, 409, 503),
    ),
    Route("GET", "/admin/limits", clients.limits, "How far each limit is used."),
    Route("GET", "/admin/limits/{account}", clients.one_limit, "Of one account.", fails=(404,)),
    Route(
        "PUT",
        "/admin/limits/{account}",
        clients.set_limits,
        "All limits of a key of the store, `key:BEGINNING`.",
        bodies.LimitsBody,
        changes=True,
        fails=(404, 409, 503),
    ),
    Route("GET", "/admin/config", general.config, "The configuration in force, secrets masked."),
    Route("GET", "/admin/changes", general.changes, "What is in force beside the file."),
    Route(
        "DELETE",
        "/admin/changes",
        general.revert,
        "Back to the file; who is drained stays drained.",
        changes=True,
        fails=(409,),
    ),
    Route("POST", "/admin/reload", general.reload, "Read the file again.", changes=True, fails=(409,)),
    Route("GET", "/admin/explain/{request_id}", general.explain, "Why a request went where.", fails=(404,)),
)

METRICS = Route("GET", "/metrics", general.metrics, "Prometheus' text.")
