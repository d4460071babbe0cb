"""The algorithms, one small class and file each; :mod:`aioinfer.diffusion.registry` finds them by name."""
