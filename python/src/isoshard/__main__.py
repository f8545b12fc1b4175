# SPDX-License-Identifier: Apache-2.0
"""python -m isoshard."""

from .cli import run

run()
