# SPDX-License-Identifier: Apache-2.0
"""The command: python -m mistakes."""

import sys

from .cli import main

sys.exit(main())
