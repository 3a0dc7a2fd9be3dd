"""What is configured, or was found out, of a backend."""

from __future__ import annotations

from dataclasses import dataclass

from policies.measured import LimitKind
from policies.profile import Profile


@dataclass(frozen=True, slots=True)
class Member:
    """None: unknown. speculates: drafts tokens (None: its profile says). remote: somebody else's, a tier's last resort.
    block_tokens: its cache's block (None: 784 with a profile, else 16). gate_at: when it passed `tierline gate`, on the
    caller's clock."""

    name: str
    profile: Profile | None = None
    reference: bool = False
    kl_bits: float | None = None
    window_tokens: int | None = None
    max_in_flight: int = 32
    kv_tokens: int = 131072
    speculates: bool | None = None
    remote: bool = False
    block_tokens: int | None = None
    gate_at: float | None = None

    @property
    def usable_window(self) -> int | None:
        """The window, less what its profile knows to be broken."""
        bounds = [self.window_tokens, self._limit(LimitKind.BROKEN_BEYOND)]
        return min([bound for bound in bounds if bound is not None], default=None)

    @property
    def collapses_beyond(self) -> int | None:
        """Tokens of context from which its profile knows speculation to collapse."""
        return self._limit(LimitKind.COLLAPSES_BEYOND)

    def _limit(self, kind: LimitKind) -> int | None:
        limits = self.profile.measured.limits if self.profile is not None else ()
        found = [one.context_tokens for one in limits if one.kind is kind and one.context_tokens is not None]
        return min(found, default=None)
