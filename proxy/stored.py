"""Stored responses: which model and backend an id belongs to, for whom it is there, and for whom it is not.

Rules: whoever may not have it is told what is told of an id that nobody has. Nothing is asked of a backend to find out.
"""

from __future__ import annotations

from proxy.access import Caller
from proxy.config import Config, ModelRoute
from proxy.errors import Outcome, ProxyError
from proxy.owners import Owners


def find_stored(owners: Owners, config: Config, ident: str, caller: Caller) -> tuple[ModelRoute, str | None]:
    """The model and the backend of GET, DELETE or cancel. Backend None: the model has one only. Raises a 404."""
    owner = owners.find(ident)
    if owners.opens(ident, caller.whose):
        for route in config.routes.values():
            if owner is not None and owner not in route.backends:
                continue
            if (owner is None and len(route.backends) > 1) or not caller.sees(route.name):
                continue
            return route, owner
    message = f"Response with id '{ident[:100]}' not found."
    raise ProxyError(Outcome.BAD_REQUEST, 404, message, code="response_not_found", param="response_id")


def previous(owners: Owners, ident: str, route: ModelRoute, caller: Caller) -> str | None:
    """The backend that `previous_response_id` is at; None: the model has one only. Raises a 404."""
    owner = owners.find(ident)
    if owners.opens(ident, caller.whose):
        if owner is not None and owner in route.backends:
            return owner
        if len(route.backends) == 1:
            return None
    message = f"Previous response with id '{ident[:100]}' not found."
    raise ProxyError(
        Outcome.BAD_REQUEST, 404, message, code="previous_response_not_found", param="previous_response_id"
    )


def refuse_taken(owners: Owners, ident: str, caller: Caller) -> None:
    """vLLM lets a request choose the id that its response is stored by. Somebody else's would be overwritten."""
    if owners.taken(ident, caller.whose):
        message = "This request_id is in use; leave it out, or choose another."
        raise ProxyError(Outcome.BAD_REQUEST, 400, message, code="request_id_in_use", param="request_id")
