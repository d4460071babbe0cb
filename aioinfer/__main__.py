"""``python -m aioinfer``."""

import sys

from aioinfer.cli.main import main

sys.exit(main())
