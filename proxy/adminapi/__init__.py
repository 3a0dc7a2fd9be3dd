"""The operator's window: an aiohttp application for the admin listener.

`listener` is the door (keys, roles, shapes), `routes` the table of what there is, which the OpenAPI document is made of too
(`document`); `backends`, `policies`, `clients` and `general` do it, on what `gear` names.
"""

from proxy.adminapi.gear import Exposition, Gear
from proxy.adminapi.listener import admin_app, admin_keys

__all__ = ["Exposition", "Gear", "admin_app", "admin_keys"]
