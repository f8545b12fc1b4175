# SPDX-License-Identifier: Apache-2.0
"""Builds outside of the source tree: `pip install ./python` leaves nothing in it.

Everything else is in pyproject.toml.
"""

import atexit
import shutil
import tempfile

from setuptools import setup

folder = tempfile.mkdtemp(prefix="isoshard-build-")
atexit.register(shutil.rmtree, folder, ignore_errors=True)
setup(options={"build": {"build_base": folder}, "egg_info": {"egg_base": folder}})
