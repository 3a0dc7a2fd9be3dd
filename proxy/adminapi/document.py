"""The OpenAPI document: of the table of routes, and of the models that bodies are read by. Nothing is written twice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from proxy import __version__
from proxy.adminapi.routes import Route
from proxy.config.bodies import schemas

EVERYWHERE = {400: "The request cannot be understood.", 401: "No admin key.", 413: "The body is too large."}
BODIES = {415: "The body is no JSON."}
CHANGES = {403: "The key may only read, or the request comes from another site."}
WORDS = {
    404: "There is no such thing.",
    409: "It does not go with what is configured; nothing changed.",
    503: "The store cannot be used.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(routes: Sequence[Route], *, keys: bool) -> dict[str, Any]:
    """OpenAPI 3.1. keys: whether the listener asks for one."""
    models = {route.body.__name__: route.body for route in routes if route.body is not None}
    references, parts = schemas(models)
    paths: dict[str, Any] = {}
    for route in routes:
        body = references[route.body.__name__] if route.body is not None else None
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, body)
    security: dict[str, Any] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tierline admin API", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**parts, "Error": _ERROR}, "securitySchemes": security},
        "security": [{"key": []}] if keys else [],
    }


def _operation(route: Route, body: dict[str, Any] | None) -> dict[str, Any]:
    json = route.path != "/metrics"
    answer = {"application/json": {"schema": {"type": "object"}}} if json else {"text/plain": {}}
    fails = {**EVERYWHERE, **{status: WORDS[status] for status in route.fails}}
    fails |= BODIES if body is not None else {}
    fails |= CHANGES if route.changes else {403: CHANGES[403]}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation: dict[str, Any] = {
        "operationId": route.does.__module__.rpartition(".")[2] + "." + route.does.__name__,
        "summary": route.says,
        "responses": {
            str(route.status): {"description": "Done.", "content": answer},
            **{str(status): {"description": fails[status], "content": error} for status in sorted(fails)},
        },
    }
    if names := re.findall(r"\{(\w+)\}", route.path):
        schema = {"type": "string", "minLength": 1}
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": schema} for name in names
        ]
    if body is not None:
        content = {"application/json": {"schema": body}}
        operation["requestBody"] = {"required": not route.optional, "content": content}
    if route.open:
        operation["security"] = []
    return operation
