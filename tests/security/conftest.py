"""The same gateway as in tests/proxy."""

from tests.proxy.conftest import backend, make_gateway, other

__all__ = ["backend", "make_gateway", "other"]
