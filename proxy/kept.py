"""What the admin API changed, in a file (`server.state`): laid over the configuration at the next start.

Rules
1. Written whole or not at all: beside it, then renamed. No secret is in it, only where one is to be read.
2. What cannot be read or does not go with the file any more is left out, all of it, and said: a gateway that serves by its
   file alone is better than none.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from proxy.config import Config, ConfigError, Overlay, load_over, overlay_of

log = logging.getLogger("tierline.reload")


def with_kept(config: Config) -> Config:
    """The configuration with what was kept over it."""
    path = config.server.state
    if path is None:
        return config
    try:
        overlay = overlay_of(json.loads(Path(path).read_text("utf-8")))
    except FileNotFoundError:
        return config
    except (OSError, ValueError) as error:
        log.error("server.state: %s cannot be used, so nothing of it is in force: %s", path, error)
        return config
    if not overlay:
        return config
    try:
        changed = load_over(config, overlay)
    except ConfigError as error:
        log.error("server.state: %s does not go with the file, so nothing of it is in force: %s", path, error)
        return config
    log.warning("server.state: %s: what the admin API changed before is in force", path)
    return changed


def keep(path: str, overlay: Overlay) -> None:
    """Raises OSError."""
    beside = f"{path}.new"
    with open(os.open(beside, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(overlay.plain(), file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
