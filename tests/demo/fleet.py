"""What a demo is made of: a fast backend and an exact one, the gateway's configuration for them, and their traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.demo.traffic import Traffic
from tests.real.server import RealServer

CONFIG = """\
# The demo's configuration: one model in two qualities, each behind a server of its own.

[server]
port = {port}
drain_timeout = 2.0

[admin]
port = {admin_port}

[telemetry]
records = "file:{records}"
decisions = true                # the live page can replay them under another policy
log_level = "warning"

[health]
interval = 1.0

[[backends]]
name = "fp8"
url = "{fp8.url}"
quality.kl_bits = 0.0055
{more[fp8]}

[[backends]]
name = "bf16"
url = "{bf16.url}"
quality.reference = true
{more[bf16]}

[models."{model}"]
tier = "balanced"

[models.{short}-exact]           # the same model, from the reference weights or not at all
alias_of = "{model}"
tier = "exact"

[models.{short}-instruct]        # the same model without its thinking, for clients that can only choose a name
alias_of = "{model}"
overrides.chat_template_kwargs.enable_thinking = false

[tiers.balanced]
max_kl_bits = 0.05
{policy}"""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Two servers, not started: `fp8` and `bf16`.

    command: the make target, which also names the folder of the demo's files. about: lines above the rows.
    more: further settings of each backend. policy: further tables. short: how the aliases of `model` begin.
    """

    command: str
    starting: str  # what takes a moment
    about: list[str]
    servers: Mapping[str, RealServer]
    model: str
    short: str
    more: Mapping[str, str]
    traffic: Callable[[str], Traffic]
    policy: str = ""

    def config(self, port: int, admin_port: int, records: object) -> str:
        """The gateway's, once the servers are started."""
        return CONFIG.format(
            port=port,
            admin_port=admin_port,
            records=records,
            model=self.model,
            short=self.short,
            more=self.more,
            policy=self.policy,
            **self.servers,
        )
