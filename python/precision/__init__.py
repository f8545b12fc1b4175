# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/precision.md: scripts, scale errors and random bugs, judged in both precisions.

python -m precision examples --output-dir runs/precision
"""
