"""``python -m aioinfer``."""

import sys

from aioinfer.cli import main

sys.exit(main())
