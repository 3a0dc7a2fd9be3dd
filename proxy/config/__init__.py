"""The configuration: one TOML file, validated whole, then frozen.

Rules
1. The only importer of pydantic.
2. A secret is a reference (`env:NAME`, `file:PATH`), read while loading and never printed: not by an error,
   not by `repr`, not by `effective`. Relative paths start at the config file's folder.
3. `values` knows the kinds of values, `sections`, `clients`, `shared` and `policy` the keys, `rules` and `clientrules` what
   must hold between keys, `problems` how a mistake is worded; `load` ties them together. Other packages import from here
   only.
"""

from proxy.config.clients import Allowed, ApiKey, KeySettings, Price, Tenant
from proxy.config.load import (
    ConfigError,
    backend_at,
    check_key,
    effective,
    load,
    load_over,
    load_policy,
    load_with,
    loads,
    read_profile,
    read_settings,
)
from proxy.config.overlay import NOTHING, Added, Overlay, Provenance, overlay_of
from proxy.config.policy import Policy
from proxy.config.rules import is_loopback, serving
from proxy.config.sections import (
    SESSION_HEADERS,
    Admin,
    AdminKey,
    Backend,
    Config,
    Health,
    Limits,
    Model,
    ModelRoute,
    Pool,
    Quality,
    Server,
    Telemetry,
    Timeouts,
)
from proxy.config.shared import ENCRYPTED, SharedLimits
from proxy.config.tls import ListenerTls, Tls
from proxy.config.values import Secret, moment

__all__ = [
    "ENCRYPTED",
    "NOTHING",
    "SESSION_HEADERS",
    "Added",
    "Admin",
    "AdminKey",
    "Allowed",
    "ApiKey",
    "Backend",
    "Config",
    "ConfigError",
    "Health",
    "KeySettings",
    "Limits",
    "ListenerTls",
    "Model",
    "ModelRoute",
    "Overlay",
    "Policy",
    "Pool",
    "Price",
    "Provenance",
    "Quality",
    "Secret",
    "Server",
    "SharedLimits",
    "Telemetry",
    "Tenant",
    "Timeouts",
    "Tls",
    "backend_at",
    "check_key",
    "effective",
    "is_loopback",
    "load",
    "load_over",
    "load_policy",
    "load_with",
    "loads",
    "moment",
    "overlay_of",
    "read_profile",
    "read_settings",
    "serving",
]
