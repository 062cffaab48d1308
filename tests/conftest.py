"""What every test shares: where the fixtures stand."""

import signal
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is slow now and then: how long an example takes says nothing about the code.
settings.register_profile("webgemma", deadline=None)
settings.load_profile("webgemma")

# Programs that the tests start are interrupted, also where these tests run in the background of a
# script, whose shell ignores Ctrl-C for them.
for _name in ("SIGINT", "SIGHUP"):
    if hasattr(signal, _name) and signal.getsignal(getattr(signal, _name)) is signal.SIG_IGN:
        signal.signal(getattr(signal, _name), signal.SIG_DFL)

FIXTURES = Path(__file__).resolve().parent / "fixtures"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "fixtures"

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/fixtures")
