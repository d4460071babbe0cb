"""Imported by every interpreter that a test of a simulated system starts."""

import os

if "SIMULATED_SYSTEM" in os.environ:
    from tests.system.simulated import install

    install(os.environ["SIMULATED_SYSTEM"])
