"""What every test shares: where the fixtures stand, and what tests need of a machine."""

import os
import random
import secrets
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from webgemma.gemma.record.matrix_tiling import MatrixUnits

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


@pytest.fixture(autouse=True)
def same_seeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the seeds of replies that are given none alike in every run of a test.

    Tiny models with random weights end a reply of their own accord now and then."""
    monkeypatch.setattr(secrets, "randbits", random.Random(request.node.nodeid).getrandbits)


@pytest.fixture(scope="session")
def matrix_units() -> MatrixUnits:
    """The matrix units of the tests' GPU. Tests that need them are skipped where it has none.

    With WEBGEMMA_MATRIX_UNITS=1, which `make matrix-units` sets, they fail there."""
    from helpers.gpu import device

    units = MatrixUnits.of(device())
    if units is None and os.environ.get("WEBGEMMA_MATRIX_UNITS"):
        pytest.fail(f"{device().name} has no matrix units.")
    if units is None:
        pytest.skip("needs matrix units: make matrix-units")
    return units
