"""What users would copy; ``python -m examples.NAME`` or ``python examples/NAME.py`` runs each."""
