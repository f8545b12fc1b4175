# SPDX-License-Identifier: Apache-2.0
"""Lets DeepSpeed run on a CPU: what its launcher sets there, before it is imported."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]
