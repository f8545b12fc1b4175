# SPDX-License-Identifier: Apache-2.0
"""python -m isoshard."""

import sys

from .cli import main

sys.exit(main())
