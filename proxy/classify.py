"""From a request's bytes and headers to what routing knows of it, and to the bytes a backend gets.

Rules: the body is read once, as spans; what must change for a backend is a splice of those bytes. No field is
judged here that the gateway does not use: the backend knows its own rules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from policies import PromptSizes, RequestFacts, TokenRatio, estimate_prompt
from proxy.config import Config, ModelRoute
from proxy.endpoints import RESPONSES_PREFIX, Endpoint
from proxy.errors import Outcome, ProxyError
from proxy.local import unknown_model
from proxy.owners import Owners
from proxy.pool import Backend
from proxy.record import Record
from proxy.relay import Limits, Plan
from proxy.wire.errors import Api
