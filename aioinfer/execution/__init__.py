"""Everything that touches a device: the launch thread, the devices, a step's way through the model."""
