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
    load_policy,
    load_with,
    loads,
    read_profile,
    read_settings,
)
from proxy.config.policy import Policy
from proxy.config.rules import is_loopback, serving
from proxy.config.sections import (
    SESSION_HEADERS,
    Admin,
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
from proxy.config.values import Secret

__all__ = [
    "ENCRYPTED",
    "SESSION_HEADERS",
    "Admin",
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
    "Policy",
    "Pool",
    "Price",
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
    "load_policy",
    "load_with",
    "loads",
    "read_profile",
    "read_settings",
    "serving",
]
