"""The configuration: one TOML file, validated whole, then frozen.

Rules
1. The only importer of pydantic.
2. A secret is a reference (`env:NAME`, `file:PATH`), read while loading and never printed: not by an error,
   not by `repr`, not by `effective`. Relative paths start at the config file's folder.
3. `values` knows the kinds of values, `sections` and `policy` the keys, `rules` what must hold between keys, `problems`
   how a mistake is worded; `load` ties them together. Other packages import from here only.
"""

from proxy.config.load import ConfigError, effective, load, load_policy, load_with, loads
from proxy.config.policy import Policy
from proxy.config.rules import is_loopback, serving
from proxy.config.sections import (
    SESSION_HEADERS,
    Admin,
    ApiKey,
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
    Tls,
)
from proxy.config.values import Secret

__all__ = [
    "SESSION_HEADERS",
    "Admin",
    "ApiKey",
    "Backend",
    "Config",
    "ConfigError",
    "Health",
    "Limits",
    "Model",
    "ModelRoute",
    "Policy",
    "Pool",
    "Quality",
    "Secret",
    "Server",
    "Telemetry",
    "Timeouts",
    "Tls",
    "effective",
    "is_loopback",
    "load",
    "load_policy",
    "load_with",
    "loads",
    "serving",
]
