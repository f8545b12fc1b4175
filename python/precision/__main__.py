# SPDX-License-Identifier: Apache-2.0
"""The command: python -m precision."""

import sys

from .cli import main

sys.exit(main())
