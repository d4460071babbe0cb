"""The algorithms, one class and file each; :mod:`aioinfer.diffusion.registry` finds them by name."""
