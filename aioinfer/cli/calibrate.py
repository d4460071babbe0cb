"""``aioinfer calibrate``: what steps take on this machine, for simulations and engines; or on another one."""

from __future__ import annotations

import argparse
from pathlib import Path

from aioinfer.cli.flags import read_settings
from aioinfer.cli.streams import check_output, note, write
from aioinfer.cli.terminal import Progress
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError

__all__ = ["calibrate"]


async def calibrate(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status: 1 where costs to check are wrong."""
    from aioinfer.loop import factory
    from aioinfer.scheduling.costs import Costs
    from aioinfer.twin import calibration
    from aioinfer.twin.roofline import roofline

    seconds = options.seconds
    if seconds is None:
        seconds = 120.0 if options.check is None else 30.0
    if not 1 <= seconds <= 3600:
        raise ConfigError(f"--seconds must be from 1 to 3600, got {seconds:g}")
    check_output(options.output)
    config: EngineConfig = factory.located(read_settings(EngineConfig, options), Progress())
    if options.check is not None:
        costs = Costs.read(options.check)
        found = await calibration.check(costs, config, seconds=seconds, progress=Progress())
        write(f"measured over expected: {found.ratio:.3f} in all, {found.decode:.3f} of decode steps, "
              f"{found.prefill:.3f} of steps with prefill ({found.steps} steps)")  # fmt: skip
        write(f"{options.check} {'agrees' if found.agrees else 'is wrong for this machine: calibrate again'}")
        return 0 if found.agrees else 1
    if options.hardware is not None:
        from aioinfer.checkpoint.files import checkpoint_at
        from aioinfer.model.inspection import read_config

        found_config = read_config(checkpoint_at(config.model_path, config.mmproj_file))
        costs = roofline(Path(config.model_name).name, found_config, options.hardware)
    else:
        note(f"aioinfer: computes steps of all sizes for {seconds:g} s")
        costs = await calibration.calibrate(config, seconds=seconds, progress=Progress())
    costs.write(options.output)
    write(costs.description)
    if (fit := costs.fit) is not None:
        write(f"R2 {fit.r2:.4f}, error of held-out steps {fit.median_error:.1%} (p90 {fit.p90_error:.1%})")
    write(f"written to {options.output}")
    return 0
