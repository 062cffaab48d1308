"""The folder of what a user keeps between two runs: the token of the page, what was typed."""

import os
import sys
from pathlib import Path

from webgemma.errors import InputError


def state_folder() -> Path:
    """Return the folder, which need not exist; InputError if the user has no home."""
    variable, below = "XDG_STATE_HOME", ".local/state"
    if sys.platform == "win32":
        variable, below = "LOCALAPPDATA", "AppData/Local"
    elif sys.platform == "darwin":
        below = "Library/Application Support"
    configured = os.environ.get(variable, "")
    try:
        base = Path(configured) if os.path.isabs(configured) else Path.home() / below
    except RuntimeError:
        raise InputError(f"This user has no home folder: name one in {variable}.") from None
    return base / "webgemma"
